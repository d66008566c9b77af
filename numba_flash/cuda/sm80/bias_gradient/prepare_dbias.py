"""The gradient of the bias in the `sm80` tier from the host: which kernels run with which grid."""

from numba_flash.cuda.arguments import (
    OF_DBIAS,
    extras_class,
    in_vectors,
    parameters_of,
    vectors_of,
)
from numba_flash.cuda.passes.prepare_dbias import Shares
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.config import BiasGradientConfig
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

KEYS_OF_RUN = 8  # neighbours among a lane's scores


class Dbias:
    """One launch, or two where the walk over what the bias broadcasts is split into shares. Of
    float32, heads that are flagged are left out (`numba_flash.cuda.passes.write_planes`).

    Parameters
    ----------
    chosen : Chosen
        What it is prepared for.
    shape : Shape
        Of the backward pass; its head dimensions are those of planes, if there are some.
    inputs : BackwardInputs
        Layouts, with heads first.
    rows : Layout
        The lse and delta, as `numba_flash.cuda.passes.preprocess` writes them.
    planes : Split, optional
        Of float32: layouts of what is read in the place of q, k, v and do.
    """

    def __init__(self, chosen: Chosen, shape, inputs, rows, planes=None):
        p, tile, x = chosen.p, chosen.tile, inputs
        dbias, gpu = chosen.call.results.dbias, chosen.call.gpu
        self._shares = Shares(p, gpu, dbias, tile, gpu.multiprocessors * tile.min_blocks)
        out = self._shares.out
        shape = shape._replace(
            vectors=vectors_of(p, x, KEYS_OF_RUN), wide=in_vectors(p, out, KEYS_OF_RUN)
        )
        self._extras = Extras(p, gpu, x, TileShape(tile.block_m, tile.block_n, bits=True))
        read, more = x, ()
        if planes is not None:
            read, more = planes, ((planes.factors, 4), (planes.flags, 3))
        self._with_planes = extras_class(p.options, ("bits",), OF_DBIAS)
        self._numbers = lambda rng=None: (p.low, p.high, parameters_of(p, rng))
        config = BiasGradientConfig(
            dtype=p.dtype,
            shape=shape,
            options=p.options.structure,
            tile=tile,
            out=out.dtype.name,
            summed=self._shares.summed,
            banded=p.band != "none",
        )
        self._sum = Launch(
            chosen.builder,
            (config,),
            gpu,
            grid=self._shares.items,
            threads=tile.threads,
            shared_bytes=tile.layout(*shape.columns).bytes,
            operands=((read.do, 5), (read.q, 5), (read.k, 5), (read.v, 5), (rows, 5), (out, 6)),
            extras=self._extras.layouts + more,
            numbers=self._numbers(),
        )
        self.launches = (*self._extras.launches, self._sum, *self._shares.launches)

    def run(self, x, rows, results, rng, planes=None) -> None:
        """Launch them, with the generator in the state `rng` if there is one; `planes` of this call
        if they were prepared for some.
        """
        numbers = None if rng is None else self._numbers(rng)
        read, extras = x, self._extras.of(x)
        if planes is not None:
            read, extras = planes, self._with_planes(*extras, planes.factors, planes.flags)

        def sum_to(out):
            self._sum(read.do, read.q, read.k, read.v, rows, out, extras=extras, numbers=numbers)

        self._shares.run(results.dbias, sum_to)
