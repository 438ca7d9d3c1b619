"""Where a drill begins to read."""

from rlbench.base.ledger import Ledger
from rlbench.workbench.drill_scene import newest_row


def test_the_first_row_of_a_table_is_not_taken_for_an_empty_table(tmp_path):
    "Rows are numbered from 0; a drill reads what comes after the newest."
    ledger = Ledger(tmp_path, 0)
    found = [newest_row(tmp_path, "events")]
    for _ in range(2):
        ledger.append("events", at=0.0, kind="Started", fields="{}")
        ledger.flush()
        found.append(newest_row(tmp_path, "events"))
    ledger.close()
    assert found == [-1, 0, 1]
