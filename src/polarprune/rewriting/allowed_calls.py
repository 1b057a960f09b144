"""List every function, method and attribute that a stored graph may use.

All of them compute tensors, sizes and numbers from tensors, sizes and numbers. None of them takes a
function, accesses memory by address, reads or writes files, hooks or storages, resizes a storage,
or returns an object that can. A graph that uses any other name cannot be stored, and a file that
contains one is refused. `ctc_loss` is excluded because torch does not check its targets and reads
memory beyond its tensors.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PruneError
from . import node_functions
from .node_functions import Function

# Element-wise operations. Each of these also exists as a method and in place (`relu_`).
_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctan2 arctanh
asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip conj_physical copysign cos
cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power floor
floor_divide fmod frac gcd ge greater greater_equal gt heaviside hypot i0 igamma igammac lcm
ldexp le lerp less less_equal lgamma log log10 log1p log2 logical_and logical_not logical_or
logical_xor logit lt masked_fill mul multiply nan_to_num ne neg negative nextafter not_equal
polygamma pow rad2deg reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinc sinh sqrt
square sub subtract tan tanh tril triu true_divide trunc xlogy
"""
_POINTWISE_OUT_OF_PLACE = """
angle conj fmax fmin frexp hardshrink isclose isfinite isinf isnan isneginf isposinf isreal
logaddexp logaddexp2 maximum minimum mvlgamma positive prelu signbit where
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff
dist equal kthvalue log_softmax logcumsumexp logsumexp max mean median min mode msort nanmean
nanmedian nanquantile nansum norm prod quantile softmax sort std sum topk trace unique
unique_consecutive var
"""
_MOVEMENT = """
adjoint broadcast_to chunk clone detach diag diag_embed diagflat diagonal dsplit flatten flip
fliplr flipud hsplit moveaxis movedim narrow permute ravel repeat_interleave reshape
resolve_conj resolve_neg roll rot90 select split split_with_sizes squeeze swapaxes swapdims t
tensor_split tile transpose unbind unflatten unsqueeze vsplit
"""
_INDEXING = """
argwhere diagonal_scatter gather index_add index_copy index_fill index_put index_select
masked_scatter masked_select nonzero scatter scatter_add scatter_reduce select_scatter
slice_scatter take take_along_dim
"""
_PRODUCTS = """
addbmm addmm addmv addr baddbmm bmm cholesky_inverse cholesky_solve corrcoef cov cross det dot
inner inverse logdet matmul matrix_exp matrix_power mm mv outer pinverse slogdet vdot
"""
_PREDICATES = "allclose is_complex is_floating_point is_nonzero is_same_size is_signed numel"
_FUNCTIONS_AND_METHODS = " ".join(
    (
        _POINTWISE,
        _POINTWISE_OUT_OF_PLACE,
        _REDUCTIONS,
        _MOVEMENT,
        _INDEXING,
        _PRODUCTS,
        _PREDICATES,
    )
)

_TORCH = f"""
{_FUNCTIONS_AND_METHODS}
adaptive_avg_pool1d adaptive_max_pool1d affine_grid_generator alpha_dropout arange atleast_1d
atleast_2d atleast_3d avg_pool1d batch_norm bernoulli bilinear binary_cross_entropy_with_logits
broadcast_tensors bucketize cat cdist celu channel_shuffle column_stack complex concat
concatenate constant_pad_nd conv1d conv2d conv3d conv_transpose1d conv_transpose2d
conv_transpose3d cosine_similarity cumulative_trapezoid dropout dstack einsum embedding empty
empty_like eye feature_alpha_dropout feature_dropout full full_like grid_sampler group_norm
hstack imag instance_norm is_tensor isin istft kl_div layer_norm linspace max_pool1d
max_pool1d_with_indices max_pool2d max_pool3d meshgrid multinomial native_channel_shuffle
native_dropout norm_except_dim ones ones_like pairwise_distance pdist pixel_shuffle
pixel_unshuffle poisson polar rand randint randn randperm real renorm rms_norm row_stack rrelu
rsub scalar_tensor searchsorted selu stack std_mean stft sym_float sym_int sym_max sym_min
sym_not sym_sqrt tensor tensordot threshold trapezoid trapz tril_indices triu_indices
unravel_index var_mean view_as_complex view_as_real vstack zeros zeros_like relu_ sigmoid_ tanh_
"""
_F = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid alpha_dropout avg_pool1d
avg_pool2d avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits
celu channel_shuffle conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
cosine_embedding_loss cosine_similarity cross_entropy dropout dropout1d dropout2d
dropout3d elu embedding embedding_bag feature_alpha_dropout fold gaussian_nll_loss gelu glu
grid_sample group_norm gumbel_softmax hardshrink hardsigmoid hardswish hardtanh
hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss layer_norm leaky_relu
linear local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d
margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mish mse_loss
multi_head_attention_forward multi_margin_loss multilabel_margin_loss
multilabel_soft_margin_loss native_channel_shuffle nll_loss normalize one_hot pad
pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 relu_
rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss
softmax softmin softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss
unfold
"""
# Files of versions 1 and 2 store these functions as "nn.gelu", after a private module of torch.
_F_IN_OLD_FILES = """
avg_pool2d avg_pool3d gelu linear one_hot pad scaled_dot_product_attention softplus softshrink
"""
_LINALG = """
cholesky cross det diagonal eigh eigvalsh inv lu_factor lu_solve matmul matrix_exp matrix_norm
matrix_power multi_dot norm pinv qr slogdet solve solve_triangular svd svdvals vecdot
vector_norm
"""
_FFT = """
fft fft2 fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft
irfft2 irfftn rfft rfft2 rfftn
"""
_SPECIAL = """
digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc gammaln i0 i0e i1 i1e
log1p log_ndtr log_softmax logit logsumexp multigammaln ndtr ndtri polygamma psi round sinc
softmax xlog1py xlogy zeta
"""
_OPERATORS = """
abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imatmul imod imul index inv invert
ior ipow isub itruediv ixor le lt matmul mod mul ne neg not_ or_ pos pow setitem sub truediv xor
"""
_METHODS = f"""
{_FUNCTIONS_AND_METHODS}
addbmm_ addmm_ addmv_ addr_ baddbmm_ bernoulli bernoulli_ bfloat16 bool byte cdouble cfloat char
contiguous copy_ cpu cuda cumprod_ cumsum_ dim double element_size expand expand_as exponential_
fill_ fill_diagonal_ float get_device half index_add_ index_copy_ index_fill_ index_put_ int
is_conj is_contiguous is_inference is_neg item istft long masked_scatter_ multinomial ndimension
nelement new_empty new_full new_ones new_tensor new_zeros normal_ numel random_ renorm repeat
reshape_as scatter_ scatter_add_ scatter_reduce_ short size squeeze_ stft storage_offset stride
sum_to_size t_ to tolist transpose_ type type_as unfold uniform_ unsqueeze_ view view_as where
zero_
{" ".join(f"{name}_" for name in _POINTWISE.split())}
"""
_ATTRIBUTES = """
H T data device dtype imag index indices is_cpu is_cuda is_floating_point is_leaf is_meta is_nested
is_quantized is_sparse itemsize layout mH mT nbytes ndim real requires_grad shape type values L LU
Q R S U V Vh eigenvalues eigenvectors logabsdet pivots sign solution
"""  # attributes of tensors, dtypes, devices and named tuples
ATTRIBUTES = frozenset(_ATTRIBUTES.split())
METHODS = frozenset(_METHODS.split())

_NAMESPACES: dict[str, tuple[object, str]] = {
    "nn": (F, _F_IN_OLD_FILES),
    "torch": (torch, _TORCH),
    "F": (F, _F),
    "linalg": (torch.linalg, _LINALG),
    "fft": (torch.fft, _FFT),
    "special": (torch.special, _SPECIAL),
    "operator": (operator, _OPERATORS),
    "builtins": (builtins, "getattr"),
    "polarprune": (node_functions, "expect expect_pieces no_channel one_channel one_point"),
}
FUNCTIONS: dict[str, Function] = {
    f"{prefix}.{name}": getattr(namespace, name)
    for prefix, (namespace, names) in _NAMESPACES.items()
    for name in names.split()
    if hasattr(namespace, name)  # older versions of torch lack some of these functions
}
FUNCTIONS["nn.log_sigmoid"] = F.logsigmoid
# Where one function has several names, the last one is stored.
_NAMES = {id(f): name for name, f in FUNCTIONS.items() if not name.startswith("nn.")}
_NAMES[id(torch._C._nn.pad)] = "F.pad"  # which takes the same arguments
_FACTORY_NAMES = """
arange empty eye full linspace ones rand randint randn randperm scalar_tensor tensor tril_indices
triu_indices zeros
"""
FACTORIES = {name: FUNCTIONS[f"torch.{name}"] for name in _FACTORY_NAMES.split()}


def function_named(name: str) -> Function:
    """Return the allowed function with this stored name.

    Raises:
        PruneError: Stored graphs may not use a function of this name.
    """
    if name not in FUNCTIONS:
        raise PruneError(f"not loaded: the file calls the function {name!r}, which is not allowed.")
    return FUNCTIONS[name]


def name_of_function(function: object) -> str:
    """Return the name under which an allowed function is stored.

    Raises:
        PruneError: Stored graphs may not use this function.
    """
    if id(function) not in _NAMES:
        raise PruneError(f"its code calls {function}, which a stored graph may not use")
    return _NAMES[id(function)]


# --- arguments ------------------------------------------------------------------------------------

_ATEN_PREFIXES = {"linalg": "linalg_", "fft": "fft_", "special": "special_"}
_UNARY_OPERATORS = ("abs", "index", "inv", "invert", "neg", "not_", "pos")
_OPERAND_COUNTS = {**dict.fromkeys(_UNARY_OPERATORS, 1), "setitem": 3}  # all others take two
# Keywords that torch accepts although its schemas use another name or none.
_EXTRA_KEYWORDS = """
a axis device dtype generator input keepdims layout memory_format names out pin_memory
requires_grad size x x1 x2
"""


def takes(kind: str, target: str, count: int, names: Iterable[str]) -> bool:
    """Return whether a call accepts these arguments, as far as its signature is known.

    Args:
        kind: `"call_function"` or `"call_method"`.
        target: The stored name of the function or method.
        count: The number of positional arguments.
        names: The names of the keyword arguments.
    """
    if target.startswith("operator."):
        operands = _OPERAND_COUNTS.get(target.removeprefix("operator."), 2)
        return count == operands and not list(names)
    signature = _signature(kind, target)
    if signature is not None:
        try:
            signature.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError:
            return False
        return True
    least, known = _schema(target)
    named = set(names)
    return count + len(named) >= least and (known is None or named <= known)


@cache
def _signature(kind: str, target: str) -> inspect.Signature | None:
    """Return the signature of a function or method, or None if it is not written in Python."""
    found = FUNCTIONS.get(target) if kind == "call_function" else getattr(Tensor, target, None)
    try:
        return inspect.signature(found) if found is not None else None
    except (TypeError, ValueError):
        return None


@cache
def _schema(target: str) -> tuple[int, frozenset[str] | None]:
    """Return the minimum number of arguments of an operation of torch, and their possible names.

    The names are None if the operation has no schema.
    """
    namespace, _, name = target.rpartition(".")
    operation = getattr(torch.ops.aten, f"{_ATEN_PREFIXES.get(namespace, '')}{name}", None)
    if operation is None or namespace == "builtins":
        return 0, None
    overloads = [getattr(operation, name)._schema.arguments for name in operation.overloads()]
    required = [sum(not one.has_default_value() for one in arguments) for arguments in overloads]
    names = [one.name for arguments in overloads for one in arguments]
    return min(required), frozenset([*names, *_EXTRA_KEYWORDS.split()])
