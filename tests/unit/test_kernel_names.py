"""Names of C++ kernels are made readable, and nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_brick.gpu.names import kernel_name

READABLE = {
    "_ZN2ns3fooILi4EfEEvPKf": "ns::foo",
    "_Z3fooPf": "foo",
    "_Z2tkIfEvPT_": "tk",
    "_ZL3fooPf": "foo",
    "_ZN12_GLOBAL__N_13barEv": "(anonymous namespace)::bar",
    "_ZSt4copyIPfEvT_": "std::copy",
    "_ZN3foo3barIJifEEEvv": "foo::bar",
    "_Z3fooILb1ELN2ns1EE3EEvv": "foo",
    "_Z3fooILin4EEvv": "foo",
    "_Z3fooIPFvifEEvT_": "foo",
    "_Z3fooIA4_iEvv": "foo",
    "_Z6kernelI6__halfLi2EEvPT_": "kernel",
    "_ZN1aIiE1bIfE1cIdEEvv": "a::b::c",
    "_ZNK1a1bEv": "a::b",
    "_ZN6cudapy8__main__4axpyB2v1B3cw5Ef": "cudapy::__main__::axpy",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_": (
        "at::native::vectorized_elementwise_kernel"
    ),
    "_ZN7cutlass6KernelINS_4gemm6kernel4GemmINS1_11threadblock13MmaMultistageINS1_9GemmShapeILi128ELi128ELi32EEEEELb1EE"
    "EEEvNT_6ParamsE": "cutlass::Kernel",
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastINS0_13BinaryFunctorIfffNS0_15binary_inter"
    "nal10MulFunctorIfEEEEEEvRNS_18TensorIteratorBaseERKT_EUliE_EEviT1_": "at::native::elementwise_kernel",
}


@pytest.mark.parametrize("mangled", READABLE)
def test_a_mangled_name_loses_its_template_arguments_and_parameters(mangled: str) -> None:
    assert kernel_name(mangled) == READABLE[mangled]


@pytest.mark.parametrize(
    "name",
    [
        "saxpy",
        "gemm_f16_128x128",
        "_Z",
        "_ZN",
        "_Z9999foo",
        "_Z0E",
        "_ZN3fooC1Ev",
        "_Z3fooIXadL_Z3barvEEEvv",
        "_ZNE",
        "",
    ],
)
def test_what_is_not_understood_stays_as_it_is(name: str) -> None:
    assert kernel_name(name) == name


def test_a_name_has_128_characters_at_most() -> None:
    assert kernel_name("x" * 300) == "x" * 128
    assert kernel_name(f"_ZN2ns200{'y' * 200}Ev") == "ns::" + "y" * 124


@given(st.text(alphabet="_ZNISTLEKPRJFAMDpt0123456789abfiv", max_size=60))
def test_nothing_raises(text: str) -> None:
    assert len(kernel_name("_Z" + text)) <= 128
