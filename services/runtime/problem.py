"""A problem that a person can act on: code, title, cause, fix.

Invariant: a `Problem` is the only exception whose text is shown to the person at the terminal;
it never carries prompt text, addresses or a traceback.

Pure: no I/O.
"""

from __future__ import annotations


class Problem(Exception):
    """Something is wrong outside the program, and somebody can mend it.

    Codes are `E` and three digits; the first digit says where: 1 settings, 2 bus, 3 model files,
    4 services, 5 the machine.
    """

    def __init__(self, code: str, title: str, *, cause: str, fix: str = "") -> None:
        super().__init__(f"{code} {title}: {cause}")
        self.code = code
        self.title = title
        self.cause = cause
        self.fix = fix

    def lines(self) -> list[str]:
        """The problem as it is printed: a headline, then `cause` and `fix`."""
        lines = [f"{self.code} {self.title}"]
        for label, text in (("cause", self.cause), ("fix", self.fix)):
            first, *rest = text.splitlines() or [""]
            if text:
                lines.append(f"  {label:<6} {first}")
                lines.extend(f"  {'':<6} {line}" for line in rest)
        return lines
