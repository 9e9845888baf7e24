"""One process is a mesh whose axes have size 1; uneven shares and many ranks are refused by name and number."""

import pytest

from oprd.parallel.mesh import Axis, Mesh


def test_an_axis_shares_evenly_or_names_what_does_not_divide():
    assert Axis("tensor", 4, 1, group=object()).share(12, "heads") == 3
    assert Axis("tensor").share(7, "heads") == 7
    with pytest.raises(ValueError, match="heads = 10 .*tensor axis = 4"):
        Axis("tensor", 4, 1, group=object()).share(10, "heads")


@pytest.mark.parametrize("size, rank, group", [(0, 0, None), (2, 2, object()), (2, -1, object()), (2, 0, None),
                                               (1, 0, object())])
def test_an_axis_that_cannot_be_is_refused(size, rank, group):
    with pytest.raises(AssertionError):
        Axis("data", size, rank, group)


def test_one_process_with_or_without_a_launcher_is_a_mesh_of_ones():
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        assert Mesh.from_environment(environment) == Mesh(data=Axis("data", 1, 0, None))


@pytest.mark.parametrize("world", ["2", "0", "-1", "two", ""])
def test_more_ranks_than_one_or_a_world_that_is_no_number_is_one_line(world):
    with pytest.raises(ValueError, match=f"WORLD_SIZE = '?{world}") as caught:
        Mesh.from_environment({"WORLD_SIZE": world})
    assert "\n" not in str(caught.value)
