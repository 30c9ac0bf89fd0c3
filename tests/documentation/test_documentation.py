"""The recorded outcomes of the documentation's blocks, and how a page is read; nothing of a page is run here."""

from __future__ import annotations

import pytest

from tests.documentation import pages, results
from tests.documentation.reasons import reason

PAGE = """# Title

```py
import torch
pipe(height=1024, num_inference_steps=50)
```

```text
not this
```

```python
print(1)
```
"""


def test_the_blocks_of_a_page():
    first, second = pages.blocks(PAGE)
    assert (first.number, second.number) == (1, 2)
    assert first.text == "import torch\npipe(height=64, num_inference_steps=4)\n"
    assert second.text == "print(1)\n"
    changed, _ = pages.blocks(PAGE.replace("num_inference_steps=50", "num_inference_steps=30"))
    assert changed.text == first.text and changed.digest != first.digest, (
        "the digest is of what the page says"
    )


@pytest.mark.parametrize("release", sorted(results.load()))
def test_no_block_ends_worse_with_the_package(release):
    faults = [
        f"{page} {row['block']}: {said}: {row['with']}"
        for page, rows in results.load()[release].items()
        for row in rows.values()
        if (said := results.fault(row))
    ]
    assert not faults, "\n".join(faults)


def test_what_counts_as_a_fault():
    def row(without, ours, same=True):
        return {"block": 1, "without": without, "with": ours, "same": same}

    assert not results.fault(row("ok", "ok"))
    assert not results.fault(row("RuntimeError: x", "ok", same=False)), "a bug that is cured"
    assert results.fault(row("ok", "ok", same=False)) == "the package changes what is computed"
    assert results.fault(row("ok", "RuntimeError: x")) == "fails with the package only"
    assert results.fault(row("RuntimeError: x", "RuntimeError: x")) == "fails for an unknown reason"
    assert reason("NameError: name 'pipe' is not defined")
    assert not results.fault(row("NameError: name 'a' is not defined", "NameError: name 'a' is not defined"))
