//! The programs of a test: as written, with full fences, and with one ordering or fence weakened.

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The bad outcome must be in no execution.
    Strong,
    /// The bad outcome, or a data race, must be in an execution.
    Weakened,
}

/// One program for herd7.
#[derive(Debug)]
pub(super) struct Program {
    /// Names what differs from the test as written.
    pub(super) what: String,
    pub(super) kind: Kind,
    pub(super) text: String,
}

const FULL_FENCE: &str = "atomic_thread_fence(memory_order_seq_cst);";

/// Returns the programs of a test, first the test as written.
///
/// A line ``(* variant NAME: `OLD` -> `NEW`; `OLD` -> `NEW` *)`` in the test makes a weakened program by
/// replacing pieces of text, each of which must be there once.
pub(super) fn variants(test: &str) -> Result<Vec<Program>, String> {
    let strong =
        |what: &str, text: String| Program { what: what.to_string(), kind: Kind::Strong, text };
    let mut programs = vec![strong("as written", test.to_string())];
    let has = |call: &str| code_lines(test).any(|(_, line)| line.contains(call));
    // Sections run only where membarrier works, so a test with sections has no such program.
    if (has("light();") || has("heavy();")) && !has("heavy_rseq();") {
        let mut text = String::new();
        for line in test.lines() {
            let fence =
                ["light();", "heavy();"].iter().any(|call| line.trim_start().starts_with(call));
            text.extend([if fence { FULL_FENCE } else { line }, "\n"]);
        }
        programs.push(strong("light and heavy as full fences", text));
    }
    let lines: Vec<&str> = test.lines().collect();
    for (number, line) in code_lines(test) {
        for (what, weaker) in weakened(line) {
            let mut changed = lines.clone();
            changed[number] = &weaker;
            let what = format!("{}: {what}", thread(&lines[..number]));
            let before = programs.iter().filter(|program| program.what.starts_with(&what)).count();
            let what = if before == 0 { what } else { format!("{what} ({})", before + 1) };
            programs.push(Program { what, kind: Kind::Weakened, text: changed.join("\n") + "\n" });
        }
    }
    for line in &lines {
        let Some(rest) = line.strip_prefix("(* variant ") else { continue };
        programs.push(named(test, line, rest).ok_or_else(|| format!("bad variant: {line}"))?);
    }
    Ok(programs)
}

/// The lines of the threads, without their comments.
fn code_lines(test: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = test.lines().enumerate().skip_while(|(_, line)| !line.starts_with("P0("));
    lines
        .take_while(|(_, line)| !line.starts_with("exists"))
        .map(|(number, line)| (number, line.split_once("//").map_or(line, |(code, _)| code)))
}

/// `P1`, of the last line that begins a thread.
fn thread<'a>(before: &[&'a str]) -> &'a str {
    let starts = before.iter().rev().find(|line| line.starts_with('P') && line.contains('('));
    starts.and_then(|line| line.split('(').next()).unwrap_or_default()
}

fn named(test: &str, line: &str, rest: &str) -> Option<Program> {
    let (name, changes) = rest.strip_suffix(" *)")?.split_once(": ")?;
    let mut text = test.replacen(line, "", 1);
    let mut new_texts = Vec::new();
    for (number, change) in changes.split("; `").enumerate() {
        let (old, new) = change.trim_start_matches('`').strip_suffix('`')?.split_once("` -> `")?;
        if old.is_empty() || text.matches(old).count() != 1 {
            return None;
        }
        // First a mark for each, so that two pieces can change places.
        text = text.replacen(old, &format!("\0{number}"), 1);
        new_texts.push(new);
    }
    for (number, new) in new_texts.iter().enumerate() {
        text = text.replacen(&format!("\0{number}"), new, 1);
    }
    Some(Program { what: format!("variant {name}"), kind: Kind::Weakened, text })
}

/// Returns each line that is weaker than `line` in one ordering or fence, and what was weakened.
fn weakened(line: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let indent = &line[..line.len() - line.trim_start().len()];
    let mut call = |call: &str, instead: &str| {
        if line.trim() != call {
            return;
        }
        let what = match instead {
            "" => format!("{} removed", call.trim_end_matches(';')),
            _ => format!("{} -> {}", call.trim_end_matches(';'), instead.trim_end_matches(';')),
        };
        found.push((what, format!("{indent}{instead}")));
    };
    call("light();", "");
    call("heavy();", "");
    call("heavy();", "light();");
    call("heavy_rseq();", "");
    call("heavy_rseq();", "heavy();");
    call("section();", "");
    for order in ["acquire", "release", "acq_rel", "seq_cst"] {
        call(&format!("atomic_thread_fence(memory_order_{order});"), "");
    }

    let operation = operation(line);
    for (at, _) in line.match_indices("memory_order_") {
        let start = at + "memory_order_".len();
        let order: &str = line[start..].split([')', ',']).next().unwrap_or_default();
        // The second ordering of a compare-exchange is that of a failure.
        let failure = if line[..at].contains("memory_order_") { " on failure" } else { "" };
        for weaker in weaker(order, line) {
            let text = format!("{}{weaker}{}", &line[..start], &line[start + order.len()..]);
            found.push((format!("{operation}: {order}{failure} -> {weaker}"), text));
        }
    }
    found
}

/// The orderings that are one step weaker.
fn weaker(order: &str, line: &str) -> &'static [&'static str] {
    match order {
        "acquire" | "release" => &["relaxed"],
        "acq_rel" => &["acquire", "release"],
        "seq_cst" if line.contains("atomic_load") => &["acquire"],
        "seq_cst" if line.contains("atomic_store") => &["release"],
        "seq_cst" => &["acq_rel"],
        _ => &[],
    }
}

/// `load(gate)` of a line with `atomic_load_explicit(gate, ...)`.
fn operation(line: &str) -> String {
    let Some((_, call)) = line.split_once("atomic_") else { return String::new() };
    let Some((name, arguments)) = call.split_once('(') else { return String::new() };
    let name = name.trim_end_matches("_explicit").trim_end_matches("_strong");
    match arguments.split_once(',') {
        Some((place, _)) => format!("{name}({place})"),
        None => name.to_string(), // a fence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: &str = "C x\n(* light(); memory_order_release *)\n\
        (* variant late: `before();` -> `after();` *)\n{}\n\n\
        P0(int *x)\n{\n  before();\n  light(); // a.rs: memory_order_acquire\n\
        \x20 int a = atomic_load_explicit(x, memory_order_acquire);\n\
        \x20 int b = atomic_load_explicit(x, memory_order_acquire);\n}\n\n\
        P1(int *x)\n{\n  heavy();\n\
        \x20 int c = atomic_compare_exchange_strong_explicit(x, e, 1, memory_order_acq_rel, memory_order_acquire);\n\
        \x20 int d = atomic_exchange_explicit(x, 1, memory_order_seq_cst);\n}\n\n\
        exists (0:a=1)\n";

    #[test]
    fn each_ordering_and_fence_is_weakened_alone() {
        let programs = variants(TEST).unwrap();
        let all: Vec<&str> = programs.iter().map(|program| program.what.as_str()).collect();
        assert_eq!(
            all,
            [
                "as written",
                "light and heavy as full fences",
                "P0: light() removed",
                "P0: load(x): acquire -> relaxed",
                "P0: load(x): acquire -> relaxed (2)",
                "P1: heavy() removed",
                "P1: heavy() -> light()",
                "P1: compare_exchange(x): acq_rel -> acquire",
                "P1: compare_exchange(x): acq_rel -> release",
                "P1: compare_exchange(x): acquire on failure -> relaxed",
                "P1: exchange(x): seq_cst -> acq_rel",
                "variant late",
            ]
        );
        let strong = programs.iter().filter(|program| program.kind == Kind::Strong).count();
        assert_eq!(strong, 2);
        // Each differs from the test in one line; full fences in two.
        let differ = |program: &Program| {
            let others = program.text.lines().zip(TEST.lines());
            others.filter(|(a, b)| a != b && b.split("//").next() != Some(a)).count()
        };
        assert_eq!(differ(&programs[1]), 2);
        assert!(programs[2..11].iter().all(|program| differ(program) == 1));
        assert!(programs[8].text.contains("memory_order_release, memory_order_acquire);"));
        assert!(
            programs[11].text.contains("  after();") && !programs[11].text.contains("before();")
        );
    }

    #[test]
    fn sections_have_no_program_with_full_fences() {
        let test =
            "P0()\n{\n  section();\n  light();\n  commit();\n}\nP1()\n{\n  heavy_rseq();\n}\n";
        let programs = variants(test).unwrap();
        let all: Vec<&str> = programs.iter().map(|program| program.what.as_str()).collect();
        assert_eq!(
            all,
            [
                "as written",
                "P0: section() removed",
                "P0: light() removed",
                "P1: heavy_rseq() removed",
                "P1: heavy_rseq() -> heavy()"
            ]
        );
    }

    #[test]
    fn two_pieces_of_text_can_change_places() {
        let test = "(* variant turned: `a();` -> `b();`; `b();` -> `a();` *)\nP0()\n{\n  a();\n  b();\n}\n";
        let programs = variants(test).unwrap();
        assert_eq!(programs[1].text, "\nP0()\n{\n  b();\n  a();\n}\n");
    }

    #[test]
    fn a_variant_replaces_text_that_is_there_once() {
        assert!(variants(&TEST.replace("`before();`", "`none();`")).is_err());
        assert!(variants(&TEST.replace("`before();`", "`;`")).is_err());
        assert!(variants(&TEST.replace("` -> `", "` => `")).is_err());
    }
}
