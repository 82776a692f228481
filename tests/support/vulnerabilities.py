"""`make dependencies`: known vulnerabilities of the versions in constraints.txt, and whether anybody could be asked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMAND = ("-m", "pip_audit", "--disable-pip", "--no-deps", "--requirement=constraints.txt", "--format=json")
VULNERABLE, NOT_ASKED = 1, 2  # exit codes


def judged(report: dict[str, Any] | None) -> tuple[int, list[str]]:
    """Exit code and lines of a report of pip-audit; None: it made none.

    pip-audit itself ends with 0 if its database knows nothing, or cannot be reached, for every single package.
    """
    found = [] if report is None else report["dependencies"]
    skipped = [one["name"] for one in found if "skip_reason" in one]
    bad = [one for one in found if one.get("vulns")]
    lines = [f"{one['name']} {one['version']}: {vuln['id']}, {_fixed(vuln)}" for one in bad for vuln in one["vulns"]]
    asked = len(found) - len(skipped)
    if not asked:
        return NOT_ASKED, ["NOT CHECKED: no database of vulnerabilities could be asked from here; try elsewhere"]
    if skipped:
        lines.append(
            f"NOT CHECKED: {len(skipped)} of {len(found)}, which the database does not have: {', '.join(skipped)}"
        )
    lines.append(f"{asked} packages checked, {len(bad)} with known vulnerabilities")
    return VULNERABLE if bad else NOT_ASKED if skipped else 0, lines


def _fixed(vuln: dict[str, Any]) -> str:
    versions = ", ".join(vuln.get("fix_versions", []))
    return f"fixed in {versions}" if versions else "no version without it"


def main() -> int:
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = None
        sys.stderr.write(done.stderr.strip().rpartition("\n")[2] + "\n")
    code, lines = judged(report)
    sys.stdout.write("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
