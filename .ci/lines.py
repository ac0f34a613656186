"""The ratchet: no room has more lines than [tool.lines.rooms] in pyproject.toml says.

A room is a folder of ssl_kd/, its top level, or firstnan/ without its tests. `--lower` writes the
present numbers where they are lower; a higher one is written by hand, with its reason in
CHANGELOG.md.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; tomli comes with pytest there
    import tomli as tomllib

SUFFIXES = {".py", ".html", ".css", ".js"}
SECTION = "[tool.lines.rooms]"


def count_lines(root):
    """Count the lines of each file by its path; what others wrote is left out."""
    files = [*sorted(root.glob("firstnan/*.py")), *sorted((root / "ssl_kd").rglob("*"))]
    return {
        file.relative_to(root).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in files
        if file.suffix in SUFFIXES and "vendor" not in file.parts
    }


def count_rooms(files):
    """Sum the lines of each room; files of ssl_kd outside a folder are in `top`."""
    rooms = Counter()
    for path, lines in files.items():
        package, *room, _ = path.split("/")
        rooms["firstnan" if package == "firstnan" else room[0] if room else "top"] += lines
    return dict(sorted(rooms.items()))


def find_faults(limits, files):
    """Return what is above its limit, or has none, a line each."""
    longest = limits.get("files", {})
    faults = [
        f"{path} has {lines} lines; expected at most {longest.get(path, limits['file'])}"
        for path, lines in files.items()
        if lines > longest.get(path, limits["file"])
    ]
    for room, lines in count_rooms(files).items():
        limit = limits["rooms"].get(room)
        if limit is None:
            faults.append(f"{room} is a new room: give it a number in [tool.lines.rooms]")
        elif lines > limit:
            faults.append(
                f"{room} has {lines:,} lines, {lines - limit:,} more than it may: take some out,"
                " or raise its number and say in CHANGELOG.md what users get for it"
            )
    return faults


def find_raised(root, limits):
    """Return the rooms with a higher number than on main, while CHANGELOG.md is that of main."""
    git = ["git", "-C", str(root)]
    for ref in ("origin/main", "main"):
        project = subprocess.run([*git, "show", f"{ref}:pyproject.toml"], capture_output=True)
        if project.returncode == 0:
            break
    else:  # no git, or a clone without main: nothing to compare with
        return []
    before = tomllib.loads(project.stdout.decode())["tool"]["lines"].get("rooms", {})
    raised = [room for room, n in limits["rooms"].items() if n > before.get(room, n)]
    same = subprocess.run([*git, "diff", "--quiet", ref, "--", "CHANGELOG.md"]).returncode == 0
    return [
        f"{room} may have more lines than on {ref}: say in CHANGELOG.md what users get for them"
        for room in (raised if same else [])
    ]


def lowered(text, files):
    """Return pyproject.toml with each room at its present lines, where these are less."""
    limits = tomllib.loads(text)["tool"]["lines"]["rooms"]
    before, header, rest = text.partition(f"{SECTION}\n")
    section, gap, after = rest.partition("\n\n")
    notes = [line for line in section.splitlines() if line.startswith("#")]
    numbers = [
        f"{room} = {min(lines, limits.get(room, lines)):_}"
        for room, lines in count_rooms(files).items()
    ]
    return before + header + "\n".join(notes + numbers) + gap + after


def main(argv, root=Path(__file__).parents[1]):
    """Print the rooms and what is wrong; return the exit code."""
    project = root / "pyproject.toml"
    files = count_lines(root)
    if "--lower" in argv:
        project.write_text(lowered(project.read_text(encoding="utf-8"), files), encoding="utf-8")
    limits = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["lines"]
    rooms = count_rooms(files)
    print("  ".join(f"{room} {lines:,}" for room, lines in rooms.items()))
    total, most = sum(rooms.values()), sum(limits["rooms"].values())
    print(f"{total:,} lines in {len(files)} files; all rooms together may have {most:,}")
    faults = find_faults(limits, files) + find_raised(root, limits)
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
