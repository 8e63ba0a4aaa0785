"""Moves programs of one corpus to another: split.py FROM TO NAME...

For programs whose answers the simulator does not share: TO is then a `differs*.txt.gz`, which is made if it is not there.
"""

import gzip
import sys
from pathlib import Path

MARK = "= "


def sections(path):
    """The text of a corpus in pieces, each of which begins with the line that says what it is."""
    return gzip.decompress(Path(path).read_bytes()).decode().split(MARK)[1:]


def write(path, pieces):
    Path(path).write_bytes(gzip.compress("".join(MARK + piece for piece in pieces).encode(), mtime=0))


def main(source, target, *names):
    kept, moved, mine = [], [], False
    for piece in sections(source):
        if piece.startswith("program "):
            mine = piece.split()[1] in names
        (moved if mine else kept).append(piece)
    found = {piece.split()[1] for piece in moved if piece.startswith("program ")}
    if missing := set(names) - found:
        sys.exit(f"{source} has no program {', '.join(sorted(missing))}")
    head = [piece for piece in kept if piece.split()[0] in ("answers", "inputs")]
    there = sections(target) if Path(target).exists() else head
    if [piece for piece in there if piece.startswith("inputs ")] != [p for p in head if p.startswith("inputs ")]:
        sys.exit(f"{source} and {target} have other inputs; name another file")
    write(target, there + moved)
    write(source, kept)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
