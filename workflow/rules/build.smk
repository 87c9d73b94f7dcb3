rule extension:
    input:
        code="results/.code/extension.txt",
    output:
        EXTENSION,
    log:
        "results/logs/extension.log",
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        mem_mb=3000,
        runtime=30,
    shell:
        "attngeo build --report {output} > {log} 2>&1"


rule tracking_store:
    output:
        TRACKING,
    log:
        "results/logs/tracking_store.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=600,
        runtime=10,
    shell:
        "attngeo track init --report {output} > {log} 2>&1"
