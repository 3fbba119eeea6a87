//! Compiles the `CoordinatorServer` of `uniffle.proto`. Its messages come from `uniffle-wire`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/uniffle.proto");
    let mut descriptors = protox::compile(["proto/uniffle.proto"], ["proto"])?;
    for file in &mut descriptors.file {
        file.service.retain(|service| service.name() == "CoordinatorServer");
    }
    tonic_prost_build::configure()
        .extern_path(".rss.common", "::uniffle_wire::proto")
        .compile_fds(descriptors)?;
    Ok(())
}
