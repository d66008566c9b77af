"""The only assembler of the package: it turns the text of a PTX instruction, and the types of its
operands, into a function of kernels.
"""

from inspect import Parameter, Signature

from llvmlite import ir

from numba_flash.cuda.runtime.lang import intrinsic, types

I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
LLVM = {
    types.float32: F32,
    types.float64: F64,
    types.uint32: I32,
    types.int32: I32,
    types.uint64: I64,
    types.void: ir.VoidType(),
}
LETTER = {F32: "f", F64: "d", I32: "r", I64: "l"}  # of a register, in a constraint


def emit(builder, text: str, operands=(), results=(), tied=(), memory=True, pure=False) -> list:
    """Values of LLVM types `results` that the instructions compute from `operands`, ``$0, $1, ...``
    in this order.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where they go.
    text : str
        The instructions.
    operands : sequence of llvmlite.ir.Value
        What they read.
    results : sequence of llvmlite.ir.Type
        What they write.
    tied : sequence of llvmlite.ir.Value
        What the first of the results hold before; they count as operands before the others.
    memory : bool
        They may read or write memory, or wait: nothing may be moved past them, and they may not be
        left out.
    pure : bool
        They only compute: the same operands give the same results, and need not be computed twice.
    """
    inputs = [*tied, *operands]
    constraints = [f"={LETTER[kind]}" for kind in results]
    constraints += [str(i) for i in range(len(tied))]
    constraints += [LETTER[value.type] for value in operands]
    constraints += ["~{memory}"] * memory
    if len(results) > 1:
        returned = ir.LiteralStructType(results)
    else:
        returned = results[0] if results else ir.VoidType()
    function = ir.FunctionType(returned, [value.type for value in inputs])
    assembler = ir.InlineAsm(function, text, ",".join(constraints), side_effect=memory)
    value = builder.call(assembler, inputs, attrs=("readnone", "nounwind") if pure else ())
    if len(results) > 1:
        return [builder.extract_value(value, i) for i in range(len(results))]
    return [value] if results else []


def instruction(name: str, text: str, result, *arguments, memory=True):
    """Function ``name(*arguments)`` of kernels: one instruction on numbers of these types."""

    def typing(context, *given):
        def codegen(context, builder, signature, values):
            results = [] if result is types.void else [LLVM[result]]
            value = emit(builder, text, values, results, memory=memory)
            return value[0] if value else context.get_dummy_value()

        return result(*arguments), codegen

    names = ["context", *(f"argument{i}" for i in range(len(arguments)))]  # Numba counts them
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in names]
    typing.__name__, typing.__signature__ = name, Signature(parameters)
    return intrinsic(typing)


def registers(first: int, count: int) -> str:
    """The operands from `first` on."""
    return ", ".join(f"${i}" for i in range(first, first + count))


def literals(*arguments) -> list[int] | None:
    """Values of literal types; None if one is not literal (Numba then asks again with literals)."""
    if not all(isinstance(x, types.IntegerLiteral) for x in arguments):
        return None
    return [x.literal_value for x in arguments]


def pointers(context, builder, array, value, count: int) -> list:
    """Where the first elements of an array are."""
    data = context.make_array(array)(context, builder, value).data
    return [builder.gep(data, [ir.Constant(I32, i)]) for i in range(count)]


def repeated(count: int, function):
    """Function ``each(arguments)`` of kernels: ``function(n, arguments)`` for every n from 0 to
    `count` - 1, a constant in each call.

    What a loop would leave to the compiler, which does not unroll large bodies: registers with an
    index that is not a constant would lie in local memory. `function` is an inlined one, and
    `arguments` a named tuple.
    """

    @intrinsic
    def each(context, arguments):
        kind = context.resolve_value_type(function)
        one = context.resolve_function_type(kind, (types.int32, arguments), {})

        def codegen(context, builder, signature, values):
            call = context.get_function(kind, one)
            for n in range(count):
                call(builder, [ir.Constant(I32, n), values[0]])
            return context.get_dummy_value()

        return types.void(arguments), codegen

    return each
