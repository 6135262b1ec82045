"""The synthetic models have the totals that their definition has."""

import pytest

from benchmarks.synthetic_models import MODELS, TableGroup, synthetic_model

# tables, inputs, rows, parameters, lookups, gathered, width, interaction, MLP input and parameters
TOTALS = {
    "criteo": (26, 26, 2_600_000, 332_800_000, 26, 3_328, 3_328, 3_328, 3_341, 1_875_457),
    "tiny": (55, 58, 70_260_160, 1_123_681_280, 85, 1_032, 672, 672, 682, 207_873),
    "small": (107, 116, 220_630_300, 7_058_084_800, 377, 8_544, 2_512, 2_512, 2_522, 1_456_129),
    "medium": (311, 337, 664_860_800, 55_349_145_600, 1611, 101_952, 17_280, 2_469, 2_494,
               3_244_033),
    "large": (612, 669, 2_846_001_000, 207_712_032_000, 6312, 404_096, 36_608, 4_576, 4_676,
              12_333_057),
    "jumbo": (1022, 1097, 5_722_001_000, 834_688_032_000, 16022, 2_054_272, 118_400, 5_920, 6_120,
              15_290_369),
    "colossal": (2002, 2153, 23_824_001_000, 5_993_472_032_000, 47302, 8_067_712, 336_768, 11_226,
                 11_726, 59_179_009),
}  # fmt: skip


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_those_of_the_definition(name):
    model = synthetic_model(name)
    assert (
        model.tables,
        model.inputs,
        model.rows,
        model.parameters,
        model.lookups,
        model.gathered,
        model.width,
        model.interaction_width,
        model.mlp_input,
        model.mlp_parameters,
    ) == TOTALS[name]
    assert set(MODELS) == set(TOTALS)


def test_groups_say_what_is_shared():
    assert synthetic_model("tiny").groups[:2] == (
        TableGroup(1, 10_000, 8, (1, 10)),
        TableGroup(1, 1_000_000, 16, (1, 10)),
    )
    assert [group.shared for group in synthetic_model("small").groups] == [True] * 3 + [False] * 6


def test_scaling_keeps_small_tables():
    scaled = synthetic_model("tiny").scaled(1000)
    assert (scaled.tables, scaled.width) == (55, 672)
    assert {group.rows for group in scaled.groups} == {10, 1000}


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match="'huge'.*tiny"):
        synthetic_model("huge")
