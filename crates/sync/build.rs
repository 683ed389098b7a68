//! Refuses a target that the crates do not support, with one error in place of one for each
//! missing system call. All of them depend on this one, so they are not compiled either.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let (os, bits) = (target("OS"), target("POINTER_WIDTH"));
    if (os.as_str(), bits.as_str()) != ("linux", "64") {
        println!("cargo::error=the offlock crates support 64-bit Linux only, not {bits}-bit {os}");
    }
}
