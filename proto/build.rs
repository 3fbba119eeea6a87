//! Compiles the services of a shuffle server in `uniffle.proto`. Their messages come from
//! `uniffle-wire`, and the service of coordinators from `uniffle-coordinator`.

mod commit;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/uniffle.proto");
    commit::record()?;

    let mut descriptors = protox::compile(["proto/uniffle.proto"], ["proto"])?;
    for file in &mut descriptors.file {
        file.service.retain(|service| service.name() != "CoordinatorServer");
    }
    tonic_prost_build::configure()
        .extern_path(".rss.common", "::uniffle_wire::proto")
        // Hot calls never reach tonic.
        .generate_default_stubs(true)
        .compile_fds(descriptors)?;
    Ok(())
}
