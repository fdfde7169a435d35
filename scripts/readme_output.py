"""Put the real report of a finished run, and the example program, into README.md.

Usage: python scripts/readme_output.py [RUN_DIR]

Without RUN_DIR only the example is refreshed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def between(text: str, name: str, end: str, body: str) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- end -->` replaced by `body`.

    Raises:
        SystemExit: the markers are not there exactly once.
    """
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- {re.escape(end)} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"README.md: needs exactly one block <!-- {name} --> ... <!-- {end} -->")
    return pattern.sub(lambda match: f"{match[1]}{body.rstrip()}\n{match[2]}", text)


def fill(readme: str, example: str, report: str | None) -> str:
    """The README with the example program, and the report when there is one."""
    filled = between(readme, "example:minimal", "/example", f"```python\n{example.rstrip()}\n```")
    if report is not None:
        fence = "````" if "```" in report else "```"
        filled = between(filled, "output:quickstart", "/output", f"{fence}text\n{report.rstrip()}\n{fence}")
    return filled


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise SystemExit(f"one RUN_DIR at most, not {len(arguments)}")
    report = None
    if arguments:
        file = Path(arguments[0]) / "report.txt"
        if not file.is_file():
            raise SystemExit(f"{file}: no such file; give the folder of a finished run")
        report = file.read_text(encoding="utf-8")
    readme = ROOT / "README.md"
    example = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    readme.write_text(fill(readme.read_text(encoding="utf-8"), example, report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
