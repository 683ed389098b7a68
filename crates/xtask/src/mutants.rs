//! Mutants: patches with planted bugs, orderings without a label, and random ones by cargo-mutants.
//!
//! | | the change | what must fail |
//! |---|---|---|
//! | labels | a labelled step, by the model tests themselves | the model that it is listed with |
//! | patches | a bug that needs code of its own, from `tests/mutants` | the model or test that its first line names |
//! | unlabelled | an ordering becomes weaker, a fence goes | a model of loom; a survivor is listed in INVARIANTS.md |
//! | random | an operator or a body, by cargo-mutants | a test |
//!
//! A survivor is a bug that no test sees, or a change that is no bug; a reader decides.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Macro, Stmt};

use crate::process::{Error, Result, read, write};
use crate::source::{self, attributes, is_test_or_model, statement_attributes};
use crate::suites::models_command;
use crate::tools;
use crate::workspace::{Crate, Workspace, choose, files, stem};

/// The time limit of one run of a patch's test. Without it a bug that makes the test hang would never end.
const PATIENCE: Duration = Duration::from_secs(1800);

/// Plants mutants at random in each crate, and prints which of them its tests catch.
pub(crate) fn random(
    ws: &Workspace,
    crates: &[Crate],
    count: usize,
    seed: Option<u64>,
) -> Result<()> {
    tools::install_subcommand(ws, "cargo-mutants", "27.1.0")?;
    let seed = seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("seed {seed}");
    for package in crates {
        let listed = ws.cargo("mutants --list").args(["-p", &package.package]).output()?;
        let mut names: Vec<&str> = listed.lines().collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut names);
        names.truncate(count);
        let mut cargo =
            ws.cargo("mutants --no-shuffle --minimum-test-timeout 60 --cargo-arg=--offline");
        cargo = cargo.args(["-p", &package.package]).arg("-o").arg(ws.target.join("mutants"));
        for name in names {
            cargo = cargo.arg("--re").arg(format!("^{}$", escaped(name)));
        }
        match cargo.words("-- --lib --tests").run() {
            Err(error) if ![2, 3].contains(&error.status()) => return Err(error),
            _ => {} // 2: one was missed; 3: one hung
        }
    }
    Ok(())
}

/// The regular expression that matches this text.
fn escaped(text: &str) -> String {
    let special =
        |c: char| c.is_ascii_punctuation() && c != '_' && c != '/' && c != '<' && c != '>';
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Checks that each patch of these crates, or of all if no name is given, builds and fails its test.
///
/// The first line of a patch names the model that must fail with it, below `models` of the crate's
/// loom tests: `model: rcu::a_reader_keeps_its_value`; or a unit test of a program, which runs with
/// `OFFLOCK_SOAK=15`: `test: worker::tests::a_write_survives`; or a stress test of a library, for code that no
/// model runs: `stress: rseq::stress::stress_nothing_is_lost`. The rest is a unified diff of the crate.
pub(crate) fn patches(ws: &Workspace, names: &[String]) -> Result<()> {
    let mut crates = ws.crates()?;
    choose(&mut crates, names, "crate", Crate::is_called)?;
    let copy = copy(ws)?;
    let (mut caught, mut missed) = (0, Vec::new());
    for package in &crates {
        for patch in
            files(&copy.root.join("crates").join(&package.name).join("tests/mutants"), "patch")
        {
            let name = format!("{}: {}", package.name, stem(&patch));
            let why = missed_patch(&copy, package, &patch)?;
            println!("{name}: {}", if why.is_some() { "MISSED" } else { "caught" });
            match why {
                None => caught += 1,
                Some(why) => missed.push(format!("{name}: {why}")),
            }
        }
    }
    println!("{caught} of {} patches caught", caught + missed.len());
    if missed.is_empty() { Ok(()) } else { Err(Error::new(missed.join("\n"))) }
}

/// Applies a patch, runs its test and takes the patch back. Returns why it is not caught.
fn missed_patch(copy: &Workspace, package: &Crate, patch: &Path) -> Result<Option<String>> {
    let first = read(patch)?.lines().next().unwrap_or_default().to_string();
    let (kind, name) = first.split_once(": ").unwrap_or_default();
    let cargo = |words: &str| copy.cargo(words).args(["-p", &package.package]);
    let command = || match kind {
        "model" => models_command(copy, package, "loom"),
        "stress" => cargo("test --lib"),
        _ => cargo("test --bins").env("OFFLOCK_SOAK", "15"),
    };
    let name = if kind == "model" { format!("models::{name}") } else { name.to_string() };
    let dir = copy.root.join("crates").join(&package.name);
    apply(copy, &dir, patch, "")?;
    let path = copy.target.join("patch.log");
    let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
    let log = Arc::new(log);
    let built = command().arg("--no-run").log(Arc::clone(&log)).run();
    let run = command()
        .args(["--", "--exact", "--include-ignored", &name])
        .log(log)
        .limit(PATIENCE)
        .run();
    apply(copy, &dir, patch, "--reverse")?;
    Ok(match (built, run) {
        (Err(_), _) => Some("it does not build".to_string()),
        _ if !read(path)?.contains("running 1 test") => Some(format!("there is no {name}")),
        (_, Ok(())) => Some(format!("{name} passes")),
        (_, Err(_)) => None,
    })
}

/// Applies a patch to the folder of a crate.
fn apply(ws: &Workspace, dir: &Path, patch: &Path, option: &str) -> Result<()> {
    let patched = ws.cmd("patch").words("--silent --strip=1 --force --fuzz=0").words(option);
    patched.arg("--input").arg(patch).dir(dir).run()
}

/// Copies every file that git knows or does not ignore to a folder below the target folder.
fn copy(ws: &Workspace) -> Result<Workspace> {
    let root = ws.target.join("mutants/workspace");
    let listed =
        ws.cmd("git").words("ls-files --cached --others --exclude-standard -z").output()?;
    let names: BTreeSet<&str> = listed.split('\0').filter(|name| !name.is_empty()).collect();
    for left in files(&root.join("crates"), "rs") {
        if !names.contains(&*left.strip_prefix(&root).unwrap_or(&left).to_string_lossy()) {
            fs::remove_file(&left).map_err(|error| Error::io(left.display(), error))?;
        }
    }
    for name in names {
        let Ok(text) = fs::read(ws.root.join(name)) else { continue }; // deleted, and not committed yet
        // An equal file keeps its time, so that cargo does not build it again.
        if !fs::read(root.join(name)).is_ok_and(|there| there == text) {
            write(root.join(name), text)?;
        }
    }
    let target = ws.target.join("mutants/target");
    fs::create_dir_all(&target).map_err(|error| Error::io(target.display(), error))?; // for the logs
    Ok(Workspace { root, target })
}

/// Weakens each ordering and removes each fence without a label, one at a time, and prints those that no
/// model of loom misses.
///
/// One build has all of them: in a copy of the workspace each gets a label, and `OFFLOCK_MUTANT` selects one.
pub(crate) fn unlabelled(ws: &Workspace, crates: &[Crate]) -> Result<()> {
    let copy = copy(ws)?;
    for package in crates.iter().filter(|package| package.models("loom").is_some()) {
        let dir = copy.root.join("crates").join(&package.name);
        let facade = if package.name == "sync" { "crate" } else { "offlock_sync" };
        let mut labels = Vec::new();
        let found = orderings(&dir)?;
        for (file, sites) in &found {
            let mut text = read(file)?;
            let shown = file.strip_prefix(&dir).unwrap_or(file).display();
            for Site { bytes, line, weaker } in sites.iter().rev() {
                let was = text[bytes.clone()].to_string();
                let mut planted = |what: &str| {
                    labels.push(format!("{shown}:{line}: {}{what}", was.replace('"', "'")));
                    format!("{facade}::is_planted({:?})", labels[labels.len() - 1])
                };
                let with = if weaker.is_empty() {
                    format!("if !{} {{ {was} }}", planted(""))
                } else {
                    let else_weaker = |rest: String, weaker: &&str| {
                        let is_planted = planted(&format!(" -> {weaker}"));
                        let path = format!("core::sync::atomic::Ordering::{weaker}");
                        format!("(if {is_planted} {{ {path} }} else {{ {rest} }})")
                    };
                    weaker.iter().fold(was.clone(), else_weaker)
                };
                text.replace_range(bytes.clone(), &with);
            }
            write(file, text)?;
        }
        let models = || models_command(&copy, package, "loom");
        models().arg("--no-run").run()?;
        let run = |label: &str, limit: Duration| {
            let path = copy.target.join("unlabelled.log");
            let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
            let models =
                models().env("OFFLOCK_MUTANT", label).words("-- models:: --skip mutants::");
            models.log(Arc::new(log)).limit(limit).run()
        };
        let began = Instant::now();
        run("of no label", PATIENCE)?; // models that run at three preemptions do not with a planted bug
        let (time, minute) = (began.elapsed(), Duration::from_secs(60));
        // A machine may be busier later: ten times as long, but five times where that is minutes.
        let limit = (time * 10).clamp(minute, minute * 5).max(time * 5);
        labels.retain(|label| {
            let survived = run(label, limit).is_ok();
            println!("{}: {} {label}", package.name, if survived { "SURVIVED" } else { "caught" });
            survived
        });
        println!("{}: {} orderings and fences that no model needs", package.name, labels.len());
        self::copy(ws)?; // the files as they were
    }
    Ok(())
}

/// An ordering or a fence without a label.
#[derive(Debug, PartialEq, Eq)]
struct Site {
    /// The span of the ordering's path, or of the fence's statement.
    bytes: Range<usize>,
    line: usize,
    /// The orderings that are one step weaker; of a fence none, which is left out.
    weaker: &'static [&'static str],
}

/// Returns the sites of each file of a crate, in order, without code for tests and for model checkers.
fn orderings(package: &Path) -> Result<Vec<(PathBuf, Vec<Site>)>> {
    let mut all: Vec<(PathBuf, Vec<Site>)> = Vec::new();
    visit_sources(package, |file, finder| match all.iter_mut().find(|(known, _)| known == file) {
        Some((_, sites)) => sites.extend(finder.sites),
        None => all.push((file.to_path_buf(), finder.sites)),
    })?;
    all.iter_mut().for_each(|(_, sites)| sites.sort_by_key(|site| site.bytes.start));
    all.retain(|(_, sites)| !sites.is_empty());
    Ok(all)
}

fn visit_sources(package: &Path, mut with: impl FnMut(&Path, Finder)) -> Result<()> {
    for module in source::modules(&package.join("src/lib.rs"), is_test_or_model)? {
        let name = stem(&module.file);
        let is_model = module.file.parent().is_some_and(|folder| folder.ends_with("src/models"));
        if is_model || name.ends_with("_tests") || name == "model" || name == "planted" {
            continue; // for tests, or for model checkers, which its own name, but no `cfg`, tells of
        }
        let mut finder = Finder::default();
        module.items.iter().for_each(|item| finder.visit_item(item));
        with(&module.file, finder);
    }
    Ok(())
}

#[derive(Default)]
struct Finder {
    sites: Vec<Site>,
    /// The labels of orderings and fences, up to the colon.
    labels: BTreeSet<String>,
}

const FENCES: [&str; 4] = ["fence", "light", "heavy", "heavy_rseq"];

fn last(path: &syn::Path) -> String {
    path.segments.last().map_or(String::new(), |name| name.ident.to_string())
}

fn is_fence_call(expr: &Expr) -> bool {
    let Expr::Call(call) = expr else { return false };
    matches!(&*call.func, Expr::Path(path) if FENCES.contains(&&*last(&path.path)))
}

impl Finder {
    fn add(&mut self, spanned: &impl Spanned, weaker: &'static [&'static str]) {
        let span = spanned.span();
        self.sites.push(Site { bytes: span.byte_range(), line: span.start().line, weaker });
    }

    fn add_label(&mut self, mac: &Macro) {
        let text = mac.tokens.to_string();
        let label = text.split('"').nth(1).unwrap_or_default();
        self.labels.insert(label.split(':').next().unwrap_or_default().to_string());
    }
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item(&mut self, item: &'ast Item) {
        let is_shown = |item: &syn::ItemImpl| {
            let name = item.trait_.as_ref().map(|(_, path, _)| last(path));
            name.is_some_and(|name| name == "Debug" || name == "Display")
        };
        let is_code = match item {
            Item::Impl(item) => !is_shown(item),
            Item::Fn(_) | Item::Mod(_) | Item::Const(_) | Item::Static(_) | Item::Trait(_) => true,
            _ => false,
        };
        if is_code && !is_test_or_model(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_or_model(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if !is_test_or_model(&item.attrs) {
            visit::visit_trait_item_fn(self, item);
        }
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if is_test_or_model(statement_attributes(stmt)) {
            return;
        }
        match stmt {
            Stmt::Expr(expr, Some(_)) if is_fence_call(expr) => self.add(stmt, &[]),
            _ => visit::visit_stmt(self, stmt),
        }
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        match expr {
            Expr::Path(path) => match &*last(&path.path) {
                "AcqRel" => self.add(path, &["Acquire", "Release"]),
                "Acquire" | "Release" | "SeqCst" => self.add(path, &["Relaxed"]),
                _ => {}
            },
            _ if is_fence_call(expr) => {}
            _ => visit::visit_expr(self, expr),
        }
    }

    /// Looks into macros whose arguments are expressions, such as `check!` and `step!`.
    fn visit_macro(&mut self, mac: &'ast Macro) {
        let name = last(&mac.path);
        if name == "order" || FENCES.contains(&&*name) {
            return self.add_label(mac);
        }
        if name.contains("assert") || ["panic", "unreachable", "write", "println"].contains(&&*name)
        {
            return;
        }
        let text = mac.tokens.to_string();
        if name == "step" && FENCES[1..].iter().any(|fence| text.contains(&format!("{fence} ("))) {
            self.add_label(mac);
        }
        let arguments = syn::punctuated::Punctuated::<Expr, syn::Token![,]>::parse_terminated;
        for expr in mac.parse_body_with(arguments).iter().flatten() {
            <Self as Visit<'_>>::visit_expr(self, expr);
        }
    }
}

/// Checks that `INVARIANTS.md` of each library accounts for every ordering and fence.
///
/// Its section "What checks each ordering and fence" has a table. The first word or words of a label, up to
/// the colon, stand in its second column. An ordering without a label is counted in one of the other
/// columns: `` `tree.rs` 3 `` are three orderings of `src/tree.rs`. A litmus test stands there by
/// its name.
#[cfg(test)]
mod tables {
    use std::collections::BTreeMap;

    use super::*;

    const HEADING: &str = "## What checks each ordering and fence";

    /// Returns the cells of the table's rows.
    fn table(text: &str) -> Vec<Vec<&str>> {
        let section = text.split_once(HEADING).map_or("", |(_, section)| section);
        let section = section.split("\n## ").next().unwrap_or_default();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
        rows.map(|row| row.split('|').map(str::trim).collect()).collect()
    }

    /// Returns the number of orderings without a label of each file that a cell counts.
    fn counted(cell: &str) -> Vec<(&str, usize)> {
        let parts: Vec<&str> = cell.split('`').collect();
        let numbers = parts.windows(2).skip(1).step_by(2).filter_map(|pair| {
            let digits = pair[1].trim_start().split(|c: char| !c.is_ascii_digit()).next()?;
            Some((pair[0].strip_suffix(".rs").map(|_| pair[0])?, digits.parse().ok()?))
        });
        numbers.collect()
    }

    #[test]
    fn each_ordering_and_fence_is_in_its_crates_table() {
        let ws = Workspace::open().unwrap();
        let mut wrong = Vec::new();
        for package in ws.libraries().unwrap() {
            let text = read(package.dir.join("INVARIANTS.md")).unwrap();
            let rows = table(&text);
            let sources = package.dir.join("src");
            let sites = orderings(&package.dir).unwrap();
            let name = |file: &Path| file.strip_prefix(&sources).unwrap().display().to_string();
            let there: BTreeMap<String, usize> =
                sites.iter().map(|(file, sites)| (name(file), sites.len())).collect();
            let mut told = BTreeMap::new();
            for (file, count) in
                rows.iter().flat_map(|row| &row[1..]).flat_map(|cell| counted(cell))
            {
                *told.entry(file.to_string()).or_default() += count;
            }
            if told != there {
                wrong.push(format!("{}: {told:?}, and the sources have {there:?}", package.name));
            }
            let mut labels = BTreeSet::new();
            visit_sources(&package.dir, |_, finder| labels.extend(finder.labels)).unwrap();
            let named: BTreeSet<&str> = rows.iter().flat_map(|row| row[1].split(", ")).collect();
            for label in labels.iter().filter(|label| !named.contains(&***label)) {
                wrong.push(format!("{}: no row has the label {label}", package.name));
            }
            for row in rows.iter().filter(|row| row.len() == 5) {
                let names = row[3].split('`').skip(1).step_by(2);
                for name in names.filter(|name| !name.ends_with(".rs")) {
                    if !ws.root.join(format!("litmus/{name}.litmus")).exists() {
                        wrong.push(format!("{}: no litmus test {name}", package.name));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A patch that a change has made stale is found before the soak.
    #[test]
    fn every_patch_applies_and_names_a_test() {
        let ws = Workspace::open().unwrap();
        for package in ws.crates().unwrap() {
            let folders = [package.dir.join("tests/models"), package.dir.join("src")];
            let sources = folders.iter().flat_map(|folder| files(folder, "rs"));
            let tests: String = sources.map(|file| read(file).unwrap()).collect();
            for patch in files(&package.dir.join("tests/mutants"), "patch") {
                let text = read(&patch).unwrap();
                let test = text.lines().next().unwrap().rsplit([':', ' ']).next().unwrap();
                assert!(
                    tests.contains(&format!("fn {test}()")),
                    "{}: no test {test}",
                    patch.display()
                );
                assert!(
                    apply(&ws, &package.dir, &patch, "--dry-run").is_ok(),
                    "{}",
                    patch.display()
                );
            }
        }
    }
}
