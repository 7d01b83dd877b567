"""What the functions of this folder take for numbers: floats, whole numbers and truth values.

Results are fractions. Without the step to float32 a whole-numbered column would cut them off, or refuse them, according
to which operation comes first.
"""

from typing import TYPE_CHECKING

from jaxtyping import AbstractDtype, Bool, Float, Real
from torch import Tensor

if TYPE_CHECKING:
    from typing import Annotated as Number
else:

    class Number(AbstractDtype):
        """`Number[Tensor, "B T"]`, as `Float` and for what `as_float` takes."""

        dtypes = (*Real.dtypes, *Bool.dtypes)


def as_float(x: Number[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x` itself where it is floating; whole numbers and truth values as float32.

    >>> as_float(torch.tensor([True, False])), as_float(torch.tensor([2], dtype=torch.int64)).dtype
    (tensor([1., 0.]), torch.float32)
    """
    return x if x.is_floating_point() else x.float()
