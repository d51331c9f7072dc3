from scripts.proof.loops.judge import Item, Judged, Known


def judge_traced(item: Item, known: Known, folder: str) -> Judged:
    raise NotImplementedError
