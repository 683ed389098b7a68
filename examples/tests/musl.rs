//! The published crates compile for musl, and call nothing that musl's C library lacks.
//!
//! No musl toolchain is needed:
//!
//! - The crates are compiled against a copy of the `libc` crate in which every
//!   `target_env = "musl"` holds and no `target_env = "gnu"` does: that copy declares the types,
//!   constants and functions of musl. Only the `tokio` feature of aio-reap is left out, because
//!   tokio's dependencies would need the same treatment; it adds no C call of its own.
//! - The C symbols that the compiled libraries leave undefined, and the C functions that their
//!   sources name (a generic function is compiled only where it is used), are compared with the
//!   exports of the shared library in Debian's `musl` package. Without that package this part says
//!   so and passes, unless `OFFLOCK_REQUIRE_ALL=1`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Each published crate: its folder, its package and its library.
const CRATES: [(&str, &str, &str); 6] = [
    ("aio-reap", "aio-reap", "aio_reap"),
    ("bufcache", "bufcache", "bufcache"),
    ("mq-rbtree", "mq-rbtree", "mq_rbtree"),
    ("percpu", "offlock-percpu", "offlock_percpu"),
    ("percpu-list", "percpu-list", "percpu_list"),
    ("radix-ctx", "radix-ctx", "radix_ctx"),
];

const FEATURES: &str = "bufcache/aio-reap,mq-rbtree/stream";

/// The path of the library in Debian's package, on x86_64 and on aarch64.
const MUSL: [&str; 2] = ["/lib/x86_64-linux-musl/libc.so", "/lib/aarch64-linux-musl/libc.so"];

/// Undefined symbols that musl's C library need not export, and what defines them.
const ELSEWHERE: [(&str, &str); 2] = [
    ("_Unwind_Resume", "the unwinder, which Rust's musl targets bring along"),
    ("__udivti3", "compiler_builtins, which std brings along"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Returns the standard output of a command.
///
/// # Panics
///
/// Panics with what it prints on its standard error if it fails.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn cargo(folder: &Path) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(folder);
    // The build of these tests may have flags of its own; this one is the same for all of them.
    for flags in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER"] {
        cargo.env_remove(flags);
    }
    cargo
}

/// The folder of the `libc` crate that the workspace uses.
fn libc_source() -> PathBuf {
    // Without the packages of other platforms, which may not have been downloaded.
    let platform = format!("--filter-platform={}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = output(cargo(&root()).args([
        "metadata",
        "--offline",
        "--locked",
        "--format-version=1",
        &platform,
    ]));
    let after = |text: &str, mark: &str| {
        let at = text.find(mark).unwrap_or_else(|| panic!("no {mark} in the metadata"));
        text[at + mark.len()..].to_owned()
    };
    let package = after(&metadata, r#"{"name":"libc","version":"0.2."#);
    let manifest = after(&package, r#""manifest_path":""#);
    let manifest = Path::new(manifest.split('"').next().unwrap());
    manifest.parent().unwrap().to_path_buf()
}

/// Writes a file unless it has that content already: cargo compiles again what is newer.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().expect("a file has a folder"))?;
    fs::write(path, content)
}

/// Copies a folder, with all Rust files made those of musl.
fn copy_as_musl(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry?.file_name()));
        if from.is_dir() {
            copy_as_musl(&from, &to)?;
        } else if from.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&from)?;
            let text = text.replace(r#"target_env = "gnu""#, "any()");
            write(&to, text.replace(r#"target_env = "musl""#, "all()").as_bytes())?;
        } else {
            write(&to, &fs::read(&from)?)?;
        }
    }
    Ok(())
}

/// Compiles the crates as for musl. Returns the folder of the libraries.
fn build() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // One for each checkout that uses this target folder: cargo tells sources by path and time.
        let mut hasher = DefaultHasher::new();
        root().hash(&mut hasher);
        let name = format!("musl-{:x}", hasher.finish());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        copy_as_musl(&libc_source(), &folder.join("libc")).unwrap();
        let text = fs::read_to_string(folder.join("libc/src/unix/linux_like/linux/mod.rs"));
        assert!(
            text.unwrap().contains("all()"),
            "the libc crate asks for its environment otherwise"
        );
        // The copy of the workspace is links, but for the lock file: the patch changes it.
        for name in ["Cargo.toml", "benches", "crates", "examples"] {
            let link = folder.join(name);
            if fs::read_link(&link).is_err() {
                std::os::unix::fs::symlink(root().join(name), link).unwrap();
            }
        }
        write(&folder.join("Cargo.lock"), &fs::read(root().join("Cargo.lock")).unwrap()).unwrap();
        let mut cargo = cargo(&folder);
        cargo.args(["build", "--offline", "--lib", "--features", FEATURES]);
        cargo.args(["--config", r#"patch.crates-io.libc.path="libc""#, "--target-dir", "target"]);
        for (_, package, _) in CRATES {
            cargo.args(["--package", package]);
        }
        cargo.envs([("CARGO_INCREMENTAL", "0"), ("CARGO_PROFILE_DEV_DEBUG", "0")]);
        output(&mut cargo);
        folder.join("target/debug")
    })
}

/// Symbols as `nm` lists them, without those that are undefined and weak: they may be missing.
fn symbols(options: &[&str], file: &Path) -> BTreeSet<String> {
    let list = output(Command::new("nm").args(options).arg(file));
    let symbol = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, _, name] | ["U", name] => Some(name.to_owned()),
        _ => None, // weak, or the name of an object file
    };
    list.lines().filter_map(symbol).collect()
}

/// A C symbol, unlike those of Rust.
fn is_c(symbol: &str) -> bool {
    !["_ZN", "_R", "__rust", "rust_", "anon."].iter().any(|rust| symbol.starts_with(rust))
}

/// The C functions that a source calls as `libc::name(` or declares in an `extern` block.
fn named_in(source: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let code: String = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let called = code.split("libc::").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_at(rest.find(|c| !is_name(c))?);
        rest.starts_with('(').then_some(name)
    });
    let blocks = code.split("extern \"C\" {").skip(1);
    let declared = blocks.flat_map(|block| {
        let end = block.find('}').unwrap_or(block.len());
        let functions = block[..end].split("fn ").skip(1);
        functions.filter_map(move |rest| rest.find('(').map(|end| &rest[..end]))
    });
    let declared = declared.filter(|name| !name.is_empty() && name.chars().all(is_name));
    called.chain(declared).map(str::to_owned).collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Each C symbol that the crates need, and the first library or source that needs it.
fn needed() -> BTreeMap<String, PathBuf> {
    let mut needed = BTreeMap::new();
    for (folder, _, library) in CRATES {
        let library = build().join(format!("lib{library}.rlib"));
        for symbol in symbols(&["--undefined-only"], &library) {
            if is_c(&symbol) {
                needed.entry(symbol).or_insert_with(|| library.clone());
            }
        }
        let mut files = Vec::new();
        sources(&root().join("crates").join(folder).join("src"), &mut files);
        for file in files {
            for name in named_in(&fs::read_to_string(&file).unwrap()) {
                needed.entry(name).or_insert_with(|| file.clone());
            }
        }
    }
    needed
}

#[test]
fn crates_compile_against_musl() {
    build();
}

#[test]
fn c_functions_of_the_crates_are_exported_by_musl() {
    let Some(musl) = MUSL.into_iter().map(Path::new).find(|path| path.exists()) else {
        let required = std::env::var_os("OFFLOCK_REQUIRE_ALL").is_some_and(|value| value == "1");
        assert!(!required, "OFFLOCK_REQUIRE_ALL=1, but Debian's package `musl` is not installed");
        eprintln!("skipped: Debian's package `musl` is not installed");
        return;
    };
    let exported = symbols(&["--dynamic", "--defined-only"], musl);
    let needed = needed();
    // If these are not found, the look at the libraries or at the sources is broken.
    for (name, ending) in [("syscall", "rlib"), ("eventfd", "")] {
        let by = needed.get(name).unwrap_or_else(|| panic!("{name} is not needed?"));
        assert!(by.to_str().unwrap().ends_with(ending), "{name} is needed by {}", by.display());
    }
    let elsewhere = ELSEWHERE.map(|(name, _)| name);
    let missing: Vec<_> = needed
        .iter()
        .filter(|(name, _)| !exported.contains(*name) && !elsewhere.contains(&name.as_str()))
        .map(|(name, by)| format!("{name}, by {}", by.display()))
        .collect();
    assert!(missing.is_empty(), "not in {}:\n{}", musl.display(), missing.join("\n"));
}

#[test]
fn functions_are_found_in_sources() {
    let source = r#"
        // libc::in_a_comment(1)
        unsafe { libc::statx(fd, libc::AT_EMPTY_PATH) };
        let iocb: libc::iocb = f(libc::c_int::MAX);
        unsafe extern "C" {
            fn pthread_atfork(child: Option<unsafe extern "C" fn()>) -> libc::c_int;
        }
        unsafe extern "C" fn handler() {}
    "#;
    let found = named_in(source);
    assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), ["pthread_atfork", "statx"]);
}
