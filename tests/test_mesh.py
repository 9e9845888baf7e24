"""One process is a mesh whose axes have size 1; what does not divide is refused by name and number."""

import pytest

from oprd.parallel.mesh import Axis, Mesh, Sizes


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
        assert Mesh.from_environment(environment=environment) == Mesh(dp=Axis("dp", 1, 0, None))


@pytest.mark.parametrize("world", ["0", "-1", "two", ""])
def test_a_world_that_is_no_number_is_one_line(world):
    with pytest.raises(ValueError, match=f"WORLD_SIZE = '{world}'") as caught:
        Mesh.from_environment(environment={"WORLD_SIZE": world})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes, world, said", [
    (Sizes(tp=2), 1, "parallel.dp = what is left x parallel.cp = 1 x parallel.tp = 2 must be the world of 1 ranks; "
                     "change one of them or start 2 ranks"),
    (Sizes(dp=3, cp=2), 4, "parallel.dp = 3 x parallel.cp = 2 x parallel.tp = 1 must be the world of 4 ranks; change one "
                           "of them or start 6 ranks"),
    (Sizes(cp=3), 4, "start 3 ranks"), (Sizes(ep=3), 4, "parallel.ep = 3 must divide the world of 4 ranks")])
def test_sizes_that_do_not_make_the_world_are_named(sizes, world, said):
    with pytest.raises(ValueError, match=said):
        sizes.fill(world)


def test_what_is_left_of_the_world_reads_different_micro_batches():
    assert Sizes(cp=2, tp=2).fill(16) == Sizes(4, 2, 2, 1)
