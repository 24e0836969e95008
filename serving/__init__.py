"""Host and device side of serving: block pool, scheduler, sampler, step, engine, HTTP."""
