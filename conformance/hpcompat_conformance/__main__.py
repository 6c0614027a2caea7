"""``python -m hpcompat_conformance``."""

from __future__ import annotations

import sys

from hpcompat_conformance.cli import main

sys.exit(main())
