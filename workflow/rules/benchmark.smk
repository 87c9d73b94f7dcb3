rule operator_benchmark:
    input:
        ancient(TRACKING),
        code=stamp("benchmarks/operators"),
    output:
        records=f"{RESULTS}/benchmarks/operators.json",
        table=f"{RESULTS}/benchmarks/operators.csv",
    log:
        f"{LOGS}/operator_benchmark.log",
    conda:
        "../../environment.yml"
    threads: asked("benchmark").threads
    resources:
        **needs("benchmark"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark operators --preset {params.preset} --stamp {input.code} > {log} 2>&1"


rule solver_benchmark:
    input:
        trained_inputs(PRESET.solver_runs),
        ancient(TRACKING),
        code=stamp("benchmarks/solver"),
    output:
        records=f"{RESULTS}/benchmarks/solver.json",
        table=f"{RESULTS}/benchmarks/solver.csv",
    log:
        f"{LOGS}/solver_benchmark.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark solver --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"


rule gpu_timings:
    input:
        ancient(TRACKING),
        code=stamp("benchmarks/gpu"),
    output:
        f"{RESULTS}/benchmarks/gpu.json",
    log:
        f"{LOGS}/gpu_timings.log",
    conda:
        "../../environment.yml"
    threads: asked("draw").threads
    resources:
        **needs("draw"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark gpu --preset {params.preset} --stamp {input.code} > {log} 2>&1"


rule edge_benchmark:
    input:
        ancient(TRACKING),
        code=stamp("benchmarks/edge"),
    output:
        records=f"{RESULTS}/benchmarks/edge.json",
        table=f"{RESULTS}/benchmarks/edge.csv",
    log:
        f"{LOGS}/edge_benchmark.log",
    conda:
        "../../environment.yml"
    threads: asked("benchmark").threads
    resources:
        **needs("benchmark"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark edge --preset {params.preset} --stamp {input.code} > {log} 2>&1"


rule token_benchmark:
    input:
        ancient(TRACKING),
        code=stamp("benchmarks/tokens"),
    output:
        records=f"{RESULTS}/benchmarks/tokens.json",
        table=f"{RESULTS}/benchmarks/tokens.csv",
    log:
        f"{LOGS}/token_benchmark.log",
    conda:
        "../../environment.yml"
    threads: asked("benchmark").threads
    resources:
        **needs("benchmark", mem_mb=PRESET.token_benchmark_mb),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark tokens --preset {params.preset} --stamp {input.code} > {log} 2>&1"


rule metric_costs:
    input:
        ancient(TRACKING),
        code=stamp("benchmarks/metric_costs"),
    output:
        records=f"{RESULTS}/benchmarks/low_rank_metric.json",
        table=f"{RESULTS}/benchmarks/low_rank_metric.csv",
    log:
        f"{LOGS}/metric_costs.log",
    conda:
        "../../environment.yml"
    threads: asked("benchmark").threads
    resources:
        **needs("benchmark"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo benchmark metric-costs --preset {params.preset} --stamp {input.code} > {log} 2>&1"
