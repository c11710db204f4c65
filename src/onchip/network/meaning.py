"""What the rows and results of a network mean to its user. It is stored with the network and changes no result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from onchip.errors import FormatError
from onchip.network.reading import is_text, real, show

MAX_TEXT = 4 << 20  # characters, in a file


@dataclass(frozen=True)
class Meaning:
    columns: tuple[str, ...] = ()  # names of the columns of the table whose rows the network reads
    classes: tuple[str, ...] = ()  # names of its outputs, which are logits
    scale: float = 0.0  # training divided byte rows by this; 0: rows were not bytes
    words: tuple[str, ...] = ()  # a vocabulary: the network reads texts as ids of its words (text/vocabulary.py)
    tokeniser: str = ""  # the rule by which texts become words

    def to_text(self) -> str:
        """JSON of the known fields; "" if there are none."""
        known = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(known) if known else ""

    @classmethod
    def from_text(cls, text: str) -> Meaning:
        """Parse the text of a file; FormatError if it is not valid."""
        try:
            parsed = json.loads(text) if len(text) <= MAX_TEXT else None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            got, expected = show(text), f"a JSON object of at most {MAX_TEXT:,} characters"
            raise FormatError("the network's description is damaged", got=got, expected=expected)
        scale = real(parsed.get("scale", 0.0), "the scale in the network's description")
        tokeniser = parsed.get("tokeniser", "")
        if not isinstance(tokeniser, str):
            raise FormatError("bad tokeniser in the network's description", got=show(tokeniser), expected="a name")
        columns, classes, words = (_strings(parsed, key) for key in ("columns", "classes", "words"))
        return cls(columns, classes, scale, words, tokeniser)

    def check(self, inputs: int, outputs: int) -> None:
        """FormatError if the numbers of columns and classes are not those of the network's inputs and outputs."""
        for what, names, count in (("columns", self.columns, inputs), ("classes", self.classes, outputs)):
            if names and len(names) != count:
                got, expected = f"{len(names)} {what}", str(count)
                raise FormatError("the network's description does not fit", got=got, expected=expected)


def _strings(parsed: dict[str, Any], key: str) -> tuple[str, ...]:
    names = parsed.get(key, [])
    # JSON can spell a lone surrogate, which can be neither printed nor written.
    if not (isinstance(names, list) and all(isinstance(name, str) and is_text(name) for name in names)):
        raise FormatError(f"bad {key} in the network's description", got=show(names), expected="a list of strings")
    return tuple(names)
