"""The fault that `testing/sass.py` looks for, in listings made by hand."""

import pytest

pytest.importorskip("triton")

from benthic.testing.sass import overwritten

LOOP = """
.L_x_1:
        /*0010*/                   LDS.128 R{load}, [R2] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR16], R24 ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, R36, gdesc[UR16], R24, gsb0 ;
        /*0050*/                   HMUL2.BF16_V2 R{mul}, R4, R5 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
        /*0070*/              @!P0 STS [R{mul}], R33 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   IMAD.MOV.U32 R32, RZ, RZ, RZ ;
"""


@pytest.mark.parametrize(
    ("load", "mul", "left", "faults"),
    [
        (40, 48, 0, 0),
        (32, 48, 0, 0),  # all is waited for before the loop begins again
        (32, 48, 1, 1),  # one group is in hand there
        (40, 48, 1, 0),
        (40, 36, 0, 1),
        (40, 31, 0, 0),
        (29, 48, 1, 1),  # four registers from 29 on: up to the first operand
        (28, 48, 1, 0),
    ],
)
def test_writes_to_what_is_in_hand(load: int, mul: int, left: int, faults: int) -> None:
    assert len(overwritten(LOOP.format(load=load, mul=mul, left=left))) == faults


def test_where_nothing_loops() -> None:
    assert overwritten(LOOP.format(load=32, mul=36, left=1).replace("BRA", "NOP")) == []
