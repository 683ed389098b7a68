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

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proc_macro2::{TokenStream, TokenTree};

use crate::process::{At, Error, Result, folder, read, write};
use crate::source::{self, is_block, is_punct, is_test_or_model, path, word};
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
        // A shard of cargo-mutants would be another sample: samples of one seed are compared across versions.
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
    let built = command().arg("--no-run").log(copy.target.join("build.log")).run();
    let run = command().args(["--", "--exact", "--include-ignored", &name]).log(&path);
    let run = run.limit(PATIENCE).run();
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
            fs::remove_file(&left).at(left)?;
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
    folder(&target)?; // for the logs
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
        for (file, Finder { sites, .. }) in &orderings(&dir)? {
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
            let models = models().env("OFFLOCK_MUTANT", label).limit(limit);
            let models = models.words("-- models:: --skip mutants::");
            models.log(copy.target.join("unlabelled.log")).run()
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

/// Returns what the files of a crate have, without code for tests and for model checkers.
fn orderings(package: &Path) -> Result<BTreeMap<PathBuf, Finder>> {
    let mut all = BTreeMap::<PathBuf, Finder>::new();
    for module in source::modules(&package.join("src/lib.rs"), is_test_or_model)? {
        let name = stem(&module.file);
        let is_model = module.file.parent().is_some_and(|folder| folder.ends_with("src/models"));
        if is_model || name.ends_with("_tests") || name == "model" || name == "planted" {
            continue; // for tests, or for model checkers, which its own name, but no `cfg`, tells of
        }
        let finder = all.entry(module.file).or_default();
        for item in module.items {
            let is_code =
                ["fn", "const", "static", "trait", "impl"].iter().any(|word| item.is(word));
            let words: Vec<String> = item.tokens.iter().filter_map(word).collect();
            let shows =
                |pair: &[String]| ["Debug", "Display"].contains(&&*pair[0]) && pair[1] == "for";
            if is_code && !words.windows(2).any(shows) {
                finder.walk(&item.tokens);
            }
        }
    }
    all.values_mut().for_each(|finder| finder.sites.sort_by_key(|site| site.bytes.start));
    Ok(all)
}

#[derive(Default)]
struct Finder {
    sites: Vec<Site>,
    /// The labels of orderings and fences, up to the colon.
    labels: BTreeSet<String>,
}

const FENCES: [&str; 4] = ["fence", "light", "heavy", "heavy_rseq"];
/// Macros whose arguments are no code of the algorithm.
const SHOWING: [&str; 4] = ["panic", "unreachable", "write", "println"];
/// Keywords that may stand before a `!` that negates: such a `!` calls no macro.
const KEYWORDS: [&str; 5] = ["if", "while", "match", "return", "in"];

impl Finder {
    fn walk(&mut self, tokens: &[TokenTree]) {
        let is = |at: Option<usize>, mark| {
            at.and_then(|at| tokens.get(at)).is_some_and(|tree| is_punct(tree, mark))
        };
        let mut at = 0;
        while at < tokens.len() {
            let (start, names) = (at, path(&tokens[at..]));
            let Some(name) = names.last().map(String::as_str) else {
                if let TokenTree::Group(group) = &tokens[at] {
                    self.walk(&group.stream().into_iter().collect::<Vec<_>>());
                }
                at += 1;
                continue;
            };
            at += 3 * names.len() - 2;
            let before = start.checked_sub(1);
            let arguments = |at: usize| match tokens.get(at) {
                Some(TokenTree::Group(group)) => Some(group.stream()),
                _ => None,
            };
            if name == "use" && !is(Some(at), '<') {
                at += tokens[at..].iter().take_while(|tree| !is_punct(tree, ';')).count();
            } else if let (true, Some(inner), false) =
                (is(Some(at), '!'), arguments(at + 1), KEYWORDS.contains(&name))
            {
                at += if self.enters(name, &inner) { 1 } else { 2 };
            } else if let (true, Some(_), false) =
                (FENCES.contains(&name), arguments(at), is(before, '.'))
            {
                // As a statement: its value is of no use.
                let is_first =
                    before.is_none_or(|at| is_block(&tokens[at]) || is_punct(&tokens[at], ';'));
                at += 1;
                if is_first && is(Some(at), ';') {
                    self.add(&tokens[start..=at], &[]);
                }
            } else if !(is(Some(at), '=') && is(Some(at + 1), '>')
                || is(Some(at), '|')
                || is(before, '|'))
            {
                match name {
                    "AcqRel" => self.add(&tokens[start..at], &["Acquire", "Release"]),
                    "Acquire" | "Release" | "SeqCst" => self.add(&tokens[start..at], &["Relaxed"]),
                    _ => {}
                }
            }
        }
    }

    /// Returns whether the arguments of a macro are code. Adds the label that they have.
    fn enters(&mut self, name: &str, arguments: &TokenStream) -> bool {
        let text = arguments.to_string();
        let is_fence = |fence: &&str| text.replace(' ', "").contains(&format!("{fence}("));
        let (is_order, is_step) = (name == "order" || FENCES.contains(&name), name == "step");
        if is_order || is_step && FENCES[1..].iter().any(is_fence) {
            let label = text.split('"').nth(1).unwrap_or_default();
            self.labels.insert(label.split(':').next().unwrap_or_default().to_string());
        }
        !is_order && !name.contains("assert") && !SHOWING.contains(&name)
    }

    fn add(&mut self, tokens: &[TokenTree], weaker: &'static [&'static str]) {
        let (start, end) = (tokens[0].span(), tokens[tokens.len() - 1].span());
        let bytes = start.byte_range().start..end.byte_range().end;
        self.sites.push(Site { bytes, line: start.start().line, weaker });
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
    use super::*;

    const HEADING: &str = "## What checks each ordering and fence";

    /// Returns the number of orderings without a label of each file that a cell counts.
    fn counted(cell: &str) -> impl Iterator<Item = (String, usize)> {
        let parts: Vec<&str> = cell.split('`').collect();
        let number = |pair: &[&str]| {
            let digits = pair[1].trim_start().split(|c: char| !c.is_ascii_digit()).next()?;
            Some((pair[0].to_string(), digits.parse().ok()?))
                .filter(|(name, _)| name.ends_with(".rs"))
        };
        parts.windows(2).skip(1).step_by(2).filter_map(number).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn each_ordering_and_fence_is_in_its_crates_table() {
        let ws = Workspace::open().unwrap();
        for package in ws.libraries().unwrap() {
            let text = read(package.dir.join("INVARIANTS.md")).unwrap();
            let section = text.split_once(HEADING).map_or("", |(_, section)| section);
            let section = section.split("\n## ").next().unwrap_or_default();
            let rows =
                section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
            let rows: Vec<Vec<&str>> =
                rows.map(|row| row.split('|').map(str::trim).collect()).collect();
            let found = orderings(&package.dir).unwrap();
            let mut there = BTreeMap::new();
            for (file, finder) in found.iter().filter(|(_, finder)| !finder.sites.is_empty()) {
                let name = file.strip_prefix(package.dir.join("src")).unwrap();
                there.insert(name.display().to_string(), finder.sites.len());
            }
            let mut told = BTreeMap::new();
            for (file, count) in
                rows.iter().flat_map(|row| &row[1..]).flat_map(|cell| counted(cell))
            {
                *told.entry(file).or_default() += count;
            }
            assert_eq!(told, there, "{}: the table, and the sources", package.name);
            let named: BTreeSet<&str> = rows.iter().flat_map(|row| row[1].split(", ")).collect();
            for label in found.values().flat_map(|finder| &finder.labels) {
                assert!(named.contains(&**label), "{}: no row has {label}", package.name);
            }
            for row in rows.iter().filter(|row| row.len() == 5) {
                for test in
                    row[3].split('`').skip(1).step_by(2).filter(|name| !name.ends_with(".rs"))
                {
                    let test = ws.root.join(format!("litmus/{test}.litmus"));
                    assert!(test.exists(), "{}: {}", package.name, test.display());
                }
            }
        }
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
