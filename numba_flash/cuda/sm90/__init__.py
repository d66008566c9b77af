"""The tier for Hopper: TMA, wgmma, warp specialisation."""
