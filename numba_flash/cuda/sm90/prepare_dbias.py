"""The gradient of a bias in the `sm90` tier from the host: which kernels run with which grid."""

from numba_flash.cuda.arguments import Extent, in_vectors, parameters_of, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_dbias import Shares
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.config import BiasGradientConfig

KEYS_OF_RUN = 2  # neighbours among a lane's scores


class Dbias:
    """One launch, or two where the walk over what the bias broadcasts is split into shares.

    Parameters
    ----------
    chosen : Chosen
        What it is prepared for.
    inputs : BackwardInputs
        Layouts, with heads first.
    rows : Layout
        The lse in base 2 and delta, as `numba_flash.cuda.preprocess` writes them.
    """

    def __init__(self, chosen: Chosen, inputs, rows):
        p, tile, x = chosen.p, chosen.tile, inputs
        dbias, gpu = chosen.call.results.dbias, chosen.call.gpu
        self._shares = Shares(p, gpu, dbias, tile, gpu.multiprocessors)
        out, items = self._shares.out, self._shares.items
        self._extras = Extras(p, gpu, x, Tiles(tile.block_m, tile.block_n, bits=True))
        extent = Extent(*p.batch, p.hq, p.hk, p.nq, p.nk, p.low, p.high)
        self._numbers = lambda rng=None: (extent, items, parameters_of(p, rng))
        config = BiasGradientConfig(
            dtype=p.dtype,
            d=p.d,
            dv=p.dv,
            banded=p.band != "none",
            options=p.options.structure,
            tile=tile,
            out=out.dtype.name,
            summed=self._shares.summed,
            wide=in_vectors(p, out, KEYS_OF_RUN),
            vectors=vectors_of(p, x, KEYS_OF_RUN),
        )
        self._sum = Launch(
            chosen.builder,
            (config,),
            gpu,
            grid=min(items, gpu.multiprocessors),
            threads=tile.threads,
            shared_bytes=tile.layout(p.d, p.dv).bytes,
            operands=((rows, 5), (out, 6)),
            extras=self._extras.layouts,
            numbers=self._numbers(),
            maps=((x.do, tile.block_m), (x.q, tile.block_m), (x.k, tile.part), (x.v, tile.part)),
        )
        self.launches = (*self._extras.launches, self._sum, *self._shares.launches)

    def run(self, x, rows, dbias, rng) -> None:
        """Launch them, with the generator in the state `rng` if there is one."""
        numbers, extras = None if rng is None else self._numbers(rng), self._extras.of(x)

        def sum_to(out):
            self._sum(x.do, x.q, x.k, x.v, rows, out, extras=extras, numbers=numbers)

        self._shares.run(dbias, sum_to)
