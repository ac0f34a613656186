"""The line budget: what the package has, room by room, against [tool.lines] in pyproject.toml."""

import sys
from collections import Counter
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; tomli comes with pytest there
    import tomli as tomllib

root = Path(__file__).parents[1]
limits = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lines"]
package = root / "ssl_kd"
files = {
    file: len(file.read_text(encoding="utf-8").splitlines())
    for pattern in ("*.py", "*.html", "*.css")
    for file in package.rglob(pattern)
}
rooms = Counter()
for file, lines in files.items():
    parts = file.relative_to(package).parts
    rooms[parts[0] if len(parts) > 1 else "(top)"] += lines
print("  ".join(f"{room} {lines:,}" for room, lines in sorted(rooms.items())))
total = rooms.total()
print(f"{total:,} lines in {len(files)} files of ssl_kd; the budget is {limits['package']:,}")

faults = [
    f"{file.relative_to(root)} has {lines} lines; expected at most {limits['file']}"
    for file, lines in files.items()
    if lines > limits["file"]
]
if total > limits["package"]:
    faults.append(
        f"{total - limits['package']:,} lines too many: take some out, or raise [tool.lines] in a"
        " commit that says what they are worth"
    )
sys.exit("\n".join(faults) or None)
