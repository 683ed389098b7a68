//! Format, clippy, documentation, layers, examples in the documentation, sizes.

use std::collections::BTreeSet;
use std::path::Path;

use crate::layers;
use crate::process::{Error, Result, read};
use crate::source::{self, Item, is_test, items};
use crate::workspace::{Crate, Workspace, files};

/// The libraries of which some public types have no example yet, and the one that `cargo doc` omits,
/// because no user calls it.
const WITHOUT_EXAMPLES: [&str; 2] = ["bufcache", "sync"];

/// Format first: it takes a second and fails most often.
///
/// clippy checks what `cargo check` would, and rustdoc uses the metadata that clippy has written.
pub(crate) fn lint(ws: &Workspace) -> Result<()> {
    ws.cargo("fmt --all --check").run()?;
    ws.cargo("fmt --manifest-path fuzz/Cargo.toml --check").run()?;
    ws.cargo("clippy --locked --workspace --all-targets -- -D warnings").run()?;
    ws.cargo("clippy --locked --manifest-path fuzz/Cargo.toml --all-targets -- -D warnings")
        // Nothing is linked here, and libFuzzer is not compiled if a path to it is given.
        .env("CUSTOM_LIBFUZZER_PATH", "none/none.a")
        .run()?;
    let doc = ws.cargo("doc --locked --workspace --no-deps");
    doc.env("RUSTDOCFLAGS", "-D warnings").run()?;
    let internal = ws.cargo("rustdoc --locked --package offlock-sync --lib");
    internal.env("RUSTDOCFLAGS", "-D warnings").run()?;
    examples(ws)?;
    layers::run(ws, &[], true)?;
    sizes(ws)
}

/// Checks that each public type of the libraries has an example in its rendered documentation.
fn examples(ws: &Workspace) -> Result<()> {
    let mut without = String::new();
    for package in ws.libraries()?.iter().filter(|p| !WITHOUT_EXAMPLES.contains(&&*p.name)) {
        let folder = ws.target.join("doc").join(package.package.replace('-', "_"));
        for page in types(&read(folder.join("all.html"))?) {
            if !has_example(&read(folder.join(page))?) {
                without += &format!("\n  {}: {page}", package.package);
            }
        }
    }
    match without.as_str() {
        "" => Ok(()),
        _ => Err(Error::new(format!("public types have no example:{without}"))),
    }
}

/// Returns the pages of types that a crate's list of items links to.
fn types(all: &str) -> BTreeSet<&str> {
    let links = all.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    let is_type = |link: &&str| {
        let name = link.rsplit('/').next().unwrap_or(link);
        let kinds = ["struct.", "enum.", "trait.", "union."];
        link.ends_with(".html") && kinds.iter().any(|kind| name.starts_with(kind))
    };
    links.filter(is_type).collect()
}

/// Returns whether the description of the item itself, above its methods, has a code block.
fn has_example(page: &str) -> bool {
    let description = page.split("top-doc").nth(1).and_then(|rest| rest.split("</details>").next());
    description.is_some_and(|text| text.contains("rust-example-rendered"))
}

/// Crate, lines in `src`, files in `src`, lines in `tests`, public functions: version 0.2.
const BEFORE: [(&str, [usize; 4]); 11] = [
    ("aio-reap", [12237, 67, 8851, 205]),
    ("aio-reap-test", [1394, 8, 0, 30]),
    ("bufcache", [16893, 74, 13434, 115]),
    ("mq-rbtree", [10768, 54, 11665, 90]),
    ("nbd-protocol", [3023, 13, 2395, 40]),
    ("nbd-server", [16458, 71, 10978, 0]),
    ("percpu", [12908, 98, 7145, 135]),
    ("percpu-list", [6191, 30, 4778, 78]),
    ("radix-ctx", [10053, 51, 5985, 123]),
    ("testkit", [2077, 19, 90, 50]),
    ("xtask", [6581, 45, 111, 0]),
];

/// Prints lines, files and public functions of all packages below `crates`, beside those of the last version.
/// The models in `src/models` count as tests.
pub(crate) fn sizes(ws: &Workspace) -> Result<()> {
    println!("{:<14} {:>15} {:>9} {:>15} {:>11}", "crate", "src", "files", "tests", "public fns");
    let mut sum = [[0; 2]; 4];
    for package in ws.crates()? {
        let (src, tests) = (package.dir.join("src"), package.dir.join("tests"));
        let lines = |folder: &Path| -> Result<usize> {
            files(folder, "rs").iter().map(|file| Ok(read(file)?.lines().count())).sum()
        };
        let models = src.join("models");
        let now = [
            lines(&src)? - lines(&models)?,
            files(&src, "rs").len() - files(&models, "rs").len(),
            lines(&tests)? + lines(&models)?,
            public_functions(&package)?,
        ];
        let before = BEFORE.iter().find(|(name, _)| *name == package.name);
        let before = before.map_or([0; 4], |(_, counts)| *counts);
        for at in 0..4 {
            sum[at] = [sum[at][0] + before[at], sum[at][1] + now[at]];
        }
        println!("{}", row(&package.name, before, now));
    }
    println!("{}", row("all", sum.map(|pair| pair[0]), sum.map(|pair| pair[1])));
    Ok(())
}

fn row(name: &str, before: [usize; 4], now: [usize; 4]) -> String {
    let pair = |at: usize| format!("{} -> {}", before[at], now[at]);
    format!("{name:<14} {:>15} {:>9} {:>15} {:>11}", pair(0), pair(1), pair(2), pair(3))
}

/// Returns the number of functions and methods that a user can call, without those whose documentation is
/// hidden, and without the methods of traits.
///
/// `unreachable_pub` is an error in CI, so that `pub fn` in the sources is what a user can call.
fn public_functions(package: &Crate) -> Result<usize> {
    let root = package.dir.join("src/lib.rs");
    let modules = if root.exists() { source::modules(&root, is_test)? } else { Vec::new() };
    let is_counted = |item: &&Item| item.is("fn") && item.is_public() && !item.is_hidden();
    let count = |item: &Item| match item.body().filter(|_| item.is("impl")) {
        Some(body) => items(body).iter().filter(is_counted).count(),
        None => usize::from(is_counted(&item)),
    };
    let shown = modules.iter().filter(|module| !module.hidden).flat_map(|module| &module.items);
    Ok(shown.filter(|item| !item.is_hidden()).map(count).sum())
}
