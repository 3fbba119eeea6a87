//! Compiles the services of `uniffle.proto`. Their messages come from `uniffle-wire`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/uniffle.proto");
    let descriptors = protox::compile(["proto/uniffle.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // The unit tests implement servers.
        .server_mod_attribute(".", "#[cfg(test)]")
        .extern_path(".rss.common", "::uniffle_wire::proto")
        .compile_fds(descriptors)?;
    Ok(())
}
