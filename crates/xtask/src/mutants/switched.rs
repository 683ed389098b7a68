//! Many random mutants in one build: each stands beside the code that it replaces, and a variable
//! of the environment says which of them is on.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::sites::{Kind, Mutant};
use super::stages::{Stage, log};
use crate::error::{Error, Result};
use crate::process::interrupted;
use crate::workspace::{Crate, Workspace};

/// The number of the mutant that is on, from 1.
pub(super) const VARIABLE: &str = "OFFLOCK_RANDOM_MUTANT";

/// The end of a crate's root. The variable is read before `main`, as a test may count allocations.
const SWITCH: &str = r#"
pub(crate) fn random_mutant(number: usize) -> bool {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static ON: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn read() {
        let number = std::env::var("VARIABLE").ok().and_then(|number| number.parse().ok());
        ON.store(number.unwrap_or(0), Ordering::Relaxed);
    }
    #[used]
    #[unsafe(link_section = ".init_array")]
    static READ: extern "C" fn() = read;
    ON.load(Ordering::Relaxed) == number
}
"#;

/// Mutants that are in the copy, and the files as they were.
pub(super) struct Together {
    pub(super) mutants: Vec<Mutant>,
    texts: BTreeMap<PathBuf, String>,
}

impl Together {
    pub(super) fn take_back(&self) -> Result<()> {
        let mut texts = self.texts.iter();
        texts.try_for_each(|(file, text)| write_file(file, text.as_str()))
    }
}

fn write_file(file: &PathBuf, text: impl AsRef<[u8]>) -> Result<()> {
    fs::write(file, text).map_err(|error| Error::io(file.display(), error))
}

/// Writes the mutants to the copy and builds it. Returns them, and those that need a build of their own.
pub(super) fn write(
    copy: &Workspace,
    package: &Crate,
    stages: &[Stage],
    drawn: Vec<Mutant>,
) -> Result<(Together, Vec<Mutant>)> {
    let mut together = Together { mutants: Vec::new(), texts: BTreeMap::new() };
    let mut alone = Vec::new();
    for mutant in drawn {
        let overlaps = |other: &Mutant| {
            let (a, b) = (&mutant.site.whole, &other.site.whole);
            mutant.file == other.file && a.start < b.end && b.start < a.end
        };
        let one = together.mutants.iter().any(overlaps);
        if one { &mut alone } else { &mut together.mutants }.push(mutant);
    }
    let root = copy.root.join("crates").join(&package.name).join("src/lib.rs");
    let files = together.mutants.iter().map(|mutant| mutant.file.clone());
    for file in files.chain([root.clone()]) {
        let text = fs::read_to_string(&file).map_err(|error| Error::io(file.display(), error))?;
        together.texts.insert(file, text);
    }
    loop {
        let mut lines = Vec::new(); // of each mutant, in the order of the mutants
        lines.resize_with(together.mutants.len(), || 0..=0);
        for (file, text) in &together.texts {
            let mut text = switch_on(text, file, &together.mutants, &mut lines);
            if *file == root {
                text = text.replace("#![forbid(unsafe_code)]", "");
                text += &SWITCH.replace("VARIABLE", VARIABLE);
            }
            write_file(file, text)?;
        }
        let Some(errors) = build(copy, stages)? else { return Ok((together, alone)) };
        let blamed = |at: usize| {
            let mutant: &Mutant = &together.mutants[at];
            // A test may include a source file by a path of its own, and the switch is not there.
            let place = format!("{}:", mutant.shown);
            let is_error = |line: &&str| line.contains(": error") && line.contains(&package.name);
            let mut lines_of_errors = errors.lines().filter(is_error).filter_map(|line| {
                line.split_once(&place)?.1.split(':').next()?.parse::<usize>().ok()
            });
            lines_of_errors.any(|line| lines[at].contains(&line))
        };
        let is_blamed: Vec<bool> = (0..together.mutants.len()).map(blamed).collect();
        if together.mutants.is_empty() {
            return Err(Error::new(format!("{} does not build:\n{errors}", package.name)));
        }
        let none = !is_blamed.contains(&true);
        let mut is_blamed = is_blamed.into_iter();
        let moved = together.mutants.extract_if(.., |_| is_blamed.next() == Some(true) || none);
        alone.extend(moved);
    }
}

/// Returns the text of a file with its mutants, each beside what it replaces, and sets their lines.
fn switch_on(
    text: &str,
    file: &PathBuf,
    mutants: &[Mutant],
    lines: &mut [RangeInclusive<usize>],
) -> String {
    let mut here: Vec<(usize, &Mutant)> =
        mutants.iter().enumerate().filter(|(_, mutant)| mutant.file == *file).collect();
    here.sort_by_key(|(_, mutant)| mutant.site.whole.start);
    let (mut switched, mut from) = (String::new(), 0);
    for (at, Mutant { site, .. }) in here {
        switched += &text[from..site.whole.start];
        from = site.whole.end;
        let line = |switched: &str| switched.matches('\n').count() + 1;
        let first = line(&switched);
        let was = &text[site.whole.clone()];
        let is_on = format!("crate::random_mutant({})", at + 1);
        if site.bytes == site.whole && matches!(site.kind, Kind::Statement | Kind::Fence) {
            let _ = write!(switched, "if !{is_on} {{ {was} }}");
        } else {
            let mut mutated = was.to_string();
            let inside = site.bytes.start - site.whole.start..site.bytes.end - site.whole.start;
            mutated.replace_range(inside, site.with);
            let _ = write!(switched, "(if {is_on} {{ {mutated} }} else {{ {was} }})");
        }
        lines[at] = first..=line(&switched);
    }
    switched + &text[from..]
}

/// Builds every stage. Returns what the compiler says if one does not build.
fn build(copy: &Workspace, stages: &[Stage]) -> Result<Option<String>> {
    for (_, cargo, _) in stages {
        let path = log(copy);
        let log = fs::File::create(&path).map_err(|error| Error::io(path.display(), error))?;
        let short = ["--no-run", "--message-format=short"];
        let built = cargo.clone().args(short).log(log.into()).run();
        match built {
            Err(error) if interrupted().is_some() => return Err(error),
            Err(_) => return Ok(Some(fs::read_to_string(&path).unwrap_or_default())),
            Ok(()) => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::sites;
    use super::*;

    #[test]
    fn a_mutant_stands_beside_what_it_replaces() {
        let text =
            "fn a() {\n    b.store(\n1, order!(Release, \"x\"));\n    c();\n    d(e < f);\n}\n";
        let file = PathBuf::from("a.rs");
        let sites = sites::sites(&[sites::parse(text).unwrap()]).remove(0);
        let chosen = ["Release", "c();", "<"];
        let mutants: Vec<Mutant> = sites
            .into_iter()
            .filter(|site| chosen.contains(&&text[site.bytes.clone()]))
            .map(|site| Mutant {
                file: file.clone(),
                shown: String::new(),
                was: String::new(),
                site,
            })
            .collect();
        let mut lines = vec![0..=0; 3];
        let switched = switch_on(text, &file, &mutants, &mut lines);
        for part in [
            "(if crate::random_mutant(1) { order!(Relaxed, \"x\") } else { order!(Release, \"x\") }));",
            "if !crate::random_mutant(2) { c(); }\n",
            "d((if crate::random_mutant(3) { e <= f } else { e < f }));\n",
        ] {
            assert!(switched.contains(part), "{part}: {switched}");
        }
        assert_eq!(lines, [3..=3, 4..=4, 5..=5]);
        sites::parse(&switched).unwrap();
    }
}
