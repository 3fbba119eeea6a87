//! Compiles the services of `uniffle.proto`; their messages are those of `uniffle-wire`.

mod commit;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/uniffle.proto");
    commit::record()?;

    let descriptors = protox::compile(["proto/uniffle.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .extern_path(".rss.common", "::uniffle_wire::proto")
        .compile_fds(descriptors)?;
    Ok(())
}
