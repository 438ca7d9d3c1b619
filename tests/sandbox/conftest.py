"""What the tests of sandboxes share."""

import pytest
from jailer import prison
from remote_sandboxes import serve

__all__ = ["serve"]


@pytest.fixture(scope="module")
def prisons():
    "The prisons of a file by tier and user, each made when it is first asked for; nothing outlives them."
    made = {}
    yield made
    assert [each.close() for each in made.values()] == [0] * len(made)


@pytest.fixture
def cell(request, prisons):
    """The prison of a tier and a user, for all programs of a file:
    a parametrized fixture of a module would be made anew for every test."""
    place = request.param
    if place not in prisons:
        prisons[place] = prison(*place)
        prisons[place].tier = place[0]
    return prisons[place]
