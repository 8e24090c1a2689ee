"""The versions that reports name."""

import numpy as np

from hpcdl.machine import versions


def test_versions(monkeypatch):
    found = versions.versions()
    assert list(found) == list(versions.PACKAGES)
    assert found["numpy"] == np.__version__
    monkeypatch.setattr(versions, "PACKAGES", ("no-package-of-this-name",))
    assert versions.versions() == {"no-package-of-this-name": "unknown"}
