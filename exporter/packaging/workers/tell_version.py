"""Prints the version of the distribution that provides a module: `tell_version.py MODULE DISTRIBUTION`."""

import sys
from importlib.metadata import distributions
from importlib.util import find_spec

module, begin = sys.argv[1:]
try:
    there = find_spec(module) is not None
except ModuleNotFoundError:  # of what holds it
    there = False
if not there:
    sys.exit(1)
print(
    next(one.version for one in distributions() if one.metadata["Name"].replace("_", "-").startswith(begin))
)
