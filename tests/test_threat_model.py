"""The threat model names, for every attack, a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "threat-model.md"


def test_every_row_names_a_test_that_exists():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    attacks = [r for r in rows if "::" in r]
    heads = [r for r in rows if re.match(r"\| (---|attack|party)", r)]
    parties = rows.index(next(r for r in rows if r.startswith("| party")))
    assert len(attacks) + len(heads) + 6 == len(rows), "a row without a test"  # six parties
    assert len(attacks) > 30
    assert parties == 0
    for row in attacks:
        path, name = re.search(r"`(tests/\w+\.py)::(test_\w+)`", row).groups()
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
