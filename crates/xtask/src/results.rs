//! The benches in a row, and the page of their figures: `benches/RESULTS.md`.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::debian::Debian;
use crate::process::{Cmd, Error, Result, read, write};
use crate::workspace::Workspace;

/// The benches that print targets, without those of the server and of the census.
const BENCHES: [&str; 6] =
    ["percpu", "radix_ctx", "percpu_list", "mq_rbtree", "bufcache", "aio_reap"];

/// Runs every bench; with `page`, what they print becomes a page of Markdown with pictures beside it.
///
/// `pace` is `--quick`, or `--smoke`: as short as it goes. Its figures decide nothing, but each bench must
/// build, run and end. It uses the profile of the stress tests, which is built fast, and leaves out the
/// server's bench, which needs one more build of the server.
///
/// A bench that fails does not end the others: the page says so, and the command fails at the end.
pub(crate) fn benches(ws: &Workspace, pace: Option<&str>, page: Option<&Path>) -> Result<()> {
    let smoke = pace == Some("--smoke");
    let mut runs = BENCHES.map(|name| (name, "")).to_vec();
    if smoke {
        let parts = ["--only counter", "--only radix", "--only list", "--only buf"];
        runs.extend(parts.map(|only| ("census", only)));
    } else {
        runs.extend(["--only N", "--only W", "--only D"].map(|only| ("nbd", only)));
        runs.push(("census", ""));
    }
    // `--workspace` each time: the features of fewer packages would compile everything anew.
    let profile = if smoke { "stress" } else { "bench --features benches/foyer,benches/runtimes" };
    let (mut printed, mut settings) = (String::new(), Vec::new());
    if !smoke {
        match newest(ws) {
            Ok(found) => settings.extend(found),
            Err(why) => printed = format!("# the installed servers and fio are measured: {why}\n"),
        }
    }
    let cargo = || {
        let cargo = ws.cargo("bench --workspace --profile").words(profile);
        let set = |cargo: Cmd, (name, value): &(&str, OsString)| {
            cargo.base_env(name, Some(value.clone()))
        };
        settings.iter().fold(cargo, set)
    };
    cargo().arg("--no-run").run()?;
    let mut failed = Vec::new();
    for (name, only) in runs {
        let mut bench = cargo().args(["--bench", name, "--"]).words(only).args(pace);
        if smoke {
            // Under 90 seconds on an idle machine, most of it the build of the census. A busy machine needs
            // a multiple of that.
            bench = bench.limit(Duration::from_secs(1200));
        }
        let said =
            if page.is_some() { bench.output() } else { bench.run().map(|()| String::new()) };
        let said = said.unwrap_or_else(|error| {
            failed.push(name);
            format!("# not measured: the bench {name} failed: {error}\n")
        });
        print!("{said}");
        let _ = write!(printed, "\n## {name}\n\n{said}");
    }
    if let Some(page) = page {
        let intro = format!(
            "# Results\n\nWritten by `cargo xtask benches --results`. The peers: {}. Programs print their \
             versions below.",
            peers(ws)?
        );
        write_page(page, &intro, &printed)?;
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::new(format!("failed: {}", failed.join(", "))))
    }
}

/// Unpacks the newest qemu-nbd, nbdkit and fio that Debian has. Returns the variables with which a bench finds them.
fn newest(ws: &Workspace) -> Result<[(&'static str, OsString); 2]> {
    let debian = Debian::open(ws, "amd64", Some("unstable"))?;
    debian.unpack(&debian.files, &["qemu-utils", "nbdkit", "fio"])?;
    for program in ["qemu-nbd", "qemu-io", "nbdkit"] {
        debian.command(program, "")?;
    }
    let fio = debian.command("fio", "")?;
    let mut path = fio.parent().unwrap_or(&fio).as_os_str().to_owned();
    path.push(":");
    path.push(env::var_os("PATH").unwrap_or_default());
    let plugins = debian.files.join("usr/lib/x86_64-linux-gnu/nbdkit/plugins");
    let file = plugins.join("nbdkit-file-plugin.so").into_os_string();
    Ok([("PATH", path), ("OFFLOCK_NBDKIT_FILE", file)])
}

/// Returns the dependencies that the manifest of the benches pins, each with its version.
fn peers(ws: &Workspace) -> Result<String> {
    let manifest = read(ws.root.join("benches/Cargo.toml"))?;
    let pinned = manifest.lines().filter(|line| line.contains("\"=") || line.contains("\"~"));
    let names: Vec<&str> = pinned.filter_map(|line| Some(line.split_once(" =")?.0)).collect();
    let tree =
        ws.cargo("tree --package benches --depth 1 --prefix none --all-features").output()?;
    let is_peer = |line: &&str| names.contains(&line.split(' ').next().unwrap_or_default());
    let peers = tree.lines().filter(is_peer).map(|line| line.trim_end_matches(" (*)"));
    Ok(peers.collect::<Vec<_>>().join(", "))
}

/// Writes a page of what benches have printed: the targets, missed ones first; the rows that a peer wins; and all
/// tables. And, beside it, the pictures of the tables that ask for one by a comment `<!-- bars 0 2 -->` with the
/// numbers of columns.
pub(crate) fn write_page(page: &Path, intro: &str, printed: &str) -> Result<()> {
    let folder = page.with_extension("");
    let (mut short, mut holds, mut lost, mut tables) =
        (String::new(), String::new(), String::new(), String::new());
    let (mut table, mut pictures) = (Vec::new(), 0);
    for line in printed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["TARGET", id, "measured", measured, "bound", bound, verdict, spread @ ..] =
            &words[..]
        {
            let rows = if *verdict == "holds" { &mut holds } else { &mut short };
            let spread = spread.join(" ");
            let _ = writeln!(rows, "| {id} | {measured} | {bound} | {verdict} | {spread} |");
        } else if let Some(row) = line.strip_prefix("#   ") {
            let _ = writeln!(lost, "- {row}");
        } else if let ["<!--", "bars", columns @ .., "-->"] = &words[..] {
            let columns: Vec<usize> = columns.iter().filter_map(|at| at.parse().ok()).collect();
            pictures += 1;
            let name = format!("{pictures}.svg");
            let beside = folder.file_name().unwrap_or_default().to_string_lossy();
            let _ = writeln!(tables, "![The table as bars]({beside}/{name})");
            write(folder.join(name), bars(&table, &columns, words.contains(&"by-row")))?;
        } else {
            if line.starts_with("|-") {
                table.drain(..table.len().saturating_sub(1)); // a table before this one
            }
            if line.starts_with('|') {
                table.push(line.trim_matches('|').split('|').map(str::trim).collect());
            }
            let text = line.strip_prefix("# ").map(|text| format!("{text}\n"));
            let _ = writeln!(tables, "{}", text.as_deref().unwrap_or(line));
        }
    }
    let heading = "| target | measured | bound | | rounds |\n|---|---|---|---|---|";
    let text = format!(
        "{intro} Missed targets come first.\n\n{heading}\n{short}{holds}\n## Rows that a peer wins\n\n\
         {lost}\n{tables}"
    );
    write(page, text)
}

/// Draws columns of a table: a bar for each number, on a scale for each row or for all. The first row has the
/// headings.
fn bars(table: &[Vec<&str>], columns: &[usize], by_row: bool) -> String {
    const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#59636e}.n{font-weight:600}\
        .c0{fill:#2a78d6}.c1{fill:#c9793f}.c2{fill:#2e915c}.c3{fill:#8c959f}\
        @media(prefers-color-scheme:dark){text{fill:#9198a1}}";
    const BAR: f64 = 15.0;
    const LONGEST: f64 = 360.0;
    // The upper end of a range such as `0.98..1.00`; what was not measured is no number.
    let value = |cell: &str| cell.rsplit("..").next().and_then(|end| end.parse::<f64>().ok());
    let values = |row: &[&str]| -> Vec<Option<f64>> {
        columns.iter().map(|at| row.get(at + 1).copied().and_then(value)).collect()
    };
    let rows = || table.iter().skip(2).map(|row| (row[0], values(row)));
    let most_of = |values: &[Option<f64>]| values.iter().flatten().copied().fold(1.0, f64::max);
    let most = rows().map(|(_, values)| most_of(&values)).fold(1.0, f64::max);
    let (mut drawn, mut y) = (Vec::new(), BAR);
    for (name, values) in rows() {
        y += BAR / 2.0;
        drawn.push((y, name, None));
        let most = if by_row { most_of(&values) } else { most };
        for (color, value) in values.into_iter().enumerate() {
            let Some(value) = value else { continue };
            let wide = LONGEST * value / most;
            drawn.push((y, table[0][columns[color] + 1], Some((value, wide, color % 4))));
            y += BAR;
        }
        y = y.max(drawn.last().map_or(0.0, |(y, ..)| y + BAR));
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 {}\" width=\"760\" role=\"img\">\n\
         <style>{STYLE}</style>\n<text x=\"8\" y=\"14\" class=\"n\">{}</text>\n",
        y + BAR,
        escaped(table.first().map_or("", |row| row[0]))
    );
    for (y, name, bar) in drawn {
        let (name, base) = (escaped(name), y + 11.0);
        let _ = match bar {
            None => writeln!(svg, "<text x=\"8\" y=\"{base}\">{name}</text>"),
            Some((value, wide, color)) => {
                let end = 326.0 + wide;
                writeln!(
                    svg,
                    "<rect x=\"320\" y=\"{y}\" width=\"{wide:.1}\" height=\"13\" class=\"c{color}\"/>\
                     <text x=\"{end:.1}\" y=\"{base}\">{value}</text>\
                     <text x=\"312\" y=\"{base}\" text-anchor=\"end\">{name}</text>"
                )
            }
        };
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
