rule extension:
    input:
        code="results/.code/extension.txt",
    output:
        EXTENSION,
    log:
        "results/logs/extension.log",
    conda:
        "../../environment.yml"
    # A compiler takes up to 2 GB; how many run at once the build finds out.
    resources:
        **needs("draw", mem_mb=3000, runtime=240),
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
        **needs("draw"),
    shell:
        "attngeo track init --report {output} > {log} 2>&1"
