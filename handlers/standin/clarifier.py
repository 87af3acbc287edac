"""The stand-in's clarifier: a story whose name is a question is asked about, every other one is clear.

What `PATCH_CLARIFIER` names is a program like this one.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    name = json.load(sys.stdin.buffer)["name"]
    json.dump({"questions": [f"What should “{name}” come to?"]} if "?" in name else {}, sys.stdout)
