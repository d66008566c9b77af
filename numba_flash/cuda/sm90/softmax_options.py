"""Online softmax of the forward pass on Hopper where options change scores, which may lie near the
end of float32, as with a bias that is meant to hide.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.fragment import build_greatest
from numba_flash.cuda.lang import f32, inline, once
from numba_flash.cuda.softmax import LAZIER, NEG_INF, build_exponentials


@once
def build_online(count, raised):
    """As `numba_flash.cuda.softmax.build_online`, of such scores; m_i are the shifts themselves,
    and P and l are `raised`.
    """
    ACC, greatest = f32, build_greatest(count)
    exponentials = build_exponentials(count, 1, far=True, raised=raised)

    @inline
    def online(s, m_i, l_i, alpha, scale_log2):
        for r in range(2):
            m_new = ptx.maximum(m_i[r], greatest(s, r))
            if (m_new - m_i[r]) * scale_log2 <= ACC(LAZIER):
                m_new = m_i[r]
            shift = m_new if m_new != ACC(NEG_INF) else ACC(0)
            alpha[r] = ptx.ex2((m_i[r] - shift) * scale_log2)
            m_i[r] = m_new
            l_i[r] *= alpha[r]
        exponentials(s, m_i, l_i, scale_log2)

    return online
