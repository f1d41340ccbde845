"""The task files that the tests of the data read, too."""

from tests.data.tasks.conftest import root

__all__ = ["root"]
