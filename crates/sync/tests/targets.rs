//! The build script refuses other targets.

use std::env;
use std::path::Path;
use std::process::Command;

#[test]
fn only_64_bit_linux_is_accepted() {
    let script = Path::new(env!("CARGO_TARGET_TMPDIR")).join("build-script");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/build.rs");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built =
        Command::new(rustc).args(["--edition=2024", source, "-o"]).arg(&script).status().unwrap();
    assert!(built.success());
    let errors = |os: &str, bits: &str| -> Vec<String> {
        let mut run = Command::new(&script);
        run.env("CARGO_CFG_TARGET_OS", os).env("CARGO_CFG_TARGET_POINTER_WIDTH", bits);
        let said = String::from_utf8(run.output().unwrap().stdout).unwrap();
        said.lines()
            .filter_map(|line| line.strip_prefix("cargo::error="))
            .map(String::from)
            .collect()
    };
    assert_eq!(errors("linux", "64"), Vec::<String>::new());
    let refused = |target| [format!("the offlock crates support 64-bit Linux only, not {target}")];
    assert_eq!(errors("macos", "64"), refused("64-bit macos"));
    assert_eq!(errors("linux", "32"), refused("32-bit linux"));
}
