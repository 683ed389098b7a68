//! Does the cache serve your workload? Replays a trace with caches of many sizes.
//!
//! ```text
//! cargo run --release --example bufcache_hits -- FILE [SVG] [--parts]
//! ```

#[path = "bufcache_replay.rs"]
mod replay;

use std::error::Error;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use bufcache::Eviction;
use clap::Parser;
use testkit::replacement::{A2, arc, lru, opt, s3_fifo};
use testkit::traces::Trace;

/// Rooms, in thousandths of the trace's blocks.
const ROOMS: [usize; 11] = [1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 800];

type Failure = Box<dyn Error + Send + Sync>;

/// The hits of a cache with so many blocks.
type Hits = fn(&[u32], usize) -> Result<u64, Failure>;

/// Hits in percent, by room and policy.
type Table = Vec<Vec<f64>>;

/// The name, the colour of the curve, and the hits. The rules that bufcache chooses from follow the
/// adaptive policy.
const POLICIES: [(&str, &str, Hits); 8] = [
    ("adaptive", "#c00", |keys, room| replay::hits(keys, room, Eviction::Adaptive)),
    ("A2", "#e80", |keys, room| replay::hits(keys, room, Eviction::A2)),
    ("A2Small", "#a60", |keys, room| replay::hits(keys, room, Eviction::A2Small)),
    ("clock", "#0a0", |keys, room| replay::hits(keys, room, Eviction::Clock)),
    ("LRU", "#06c", |keys, room| Ok(lru(keys, room))),
    ("ARC", "#80c", |keys, room| Ok(arc(keys, room))),
    ("S3-FIFO", "#088", |keys, room| Ok(s3_fifo(keys, room))),
    ("OPT", "#888", |keys, room| Ok(opt(keys, room))),
];
/// The number of rules that bufcache chooses from.
const RULES: usize = 3;

/// The rules with and without their parts, simulated. The cache itself has no such options.
const SIMULATED: [Hits; 8] = [
    |keys, room| Ok(A2::default().hits(keys, room)),
    |keys, room| Ok(A2 { fills_main: false, ..A2::default() }.hits(keys, room)),
    |keys, room| Ok(A2 { counts_new: true, ..A2::default() }.hits(keys, room)),
    |keys, room| Ok(A2 { uses: 2, ..A2::default() }.hits(keys, room)),
    |keys, room| Ok(A2 { ghosts: |room, _| room, ..A2::default() }.hits(keys, room)),
    |keys, room| Ok(A2::small().hits(keys, room)),
    |keys, room| Ok(A2 { gate: false, ..A2::small() }.hits(keys, room)),
    |keys, room| Ok(A2 { gate: true, ..A2::default() }.hits(keys, room)),
];

/// A part, and the two columns of [`SIMULATED`] with and without it.
const PARTS: [(&str, usize, usize); 6] = [
    ("A2: main is filled first", 0, 1),
    ("A2: early hits do not count", 0, 2),
    ("A2: one later hit is enough", 0, 3),
    ("A2: two ghosts per block, not one", 0, 4),
    ("A2Small: the gate", 5, 6),
    ("A2Small: a tenth of the probation", 5, 7),
];

/// Replays a trace of block numbers with caches of many sizes.
///
/// Prints the hits in percent for each size: of the adaptive policy of bufcache, of the rules that it
/// chooses from, of least recently used (LRU), ARC and S3-FIFO, and of OPT, which knows the future
/// and which no cache can beat. Draws the same as curves.
#[derive(Parser)]
#[command(name = "bufcache_hits", version)]
struct Args {
    /// The trace, in the format of ARC (four numbers per line) or of LIRS (one per line); packed by zstd or gzip if
    /// its name ends so.
    file: PathBuf,
    /// Draw the curves into this file.
    #[arg(default_value = "hits.svg")]
    svg: PathBuf,
    /// Also print what each part of the policy gains.
    #[arg(long)]
    parts: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bufcache_hits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let trace = Trace::read(&args.file)?;
    if trace.keys.is_empty() {
        return Err(format!("{} has no requests", args.file.display()).into());
    }
    // Before the replay, which takes minutes if the trace is long.
    let mut picture = File::create(&args.svg).map_err(|error| in_file(&args.svg, &error))?;
    let mut rooms = ROOMS.map(|part| (trace.blocks * part / 1000).max(1)).to_vec();
    rooms.dedup();
    let table = measure(&trace, &rooms, &POLICIES.map(|(.., hits)| hits))?;
    let mut text = print(&trace, &rooms, &table)?;
    if args.parts {
        text += &print_parts(&rooms, &table, &measure(&trace, &rooms, &SIMULATED)?)?;
    }
    let drawn = draw(&trace, &rooms, &table);
    picture.write_all(drawn.as_bytes()).map_err(|error| in_file(&args.svg, &error))?;
    writeln!(text, "curves: {}", args.svg.display())?;
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn in_file(path: &Path, error: &io::Error) -> Failure {
    format!("{}: {error}", path.display()).into()
}

/// Hits in percent, by room and policy. Each thread takes the next pair of these that none has taken.
fn measure(trace: &Trace, rooms: &[usize], policies: &[Hits]) -> Result<Table, Failure> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(vec![vec![0.0; policies.len()]; rooms.len()]);
    let work = || -> Result<(), Failure> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (row, column) = (at / policies.len(), at % policies.len());
            let Some(&room) = rooms.get(row) else { return Ok(()) };
            let hits = policies[column](&trace.keys, room)?;
            let percent = 100.0 * hits as f64 / trace.keys.len() as f64;
            results.lock().unwrap_or_else(PoisonError::into_inner)[row][column] = percent;
        }
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| Failure::from("a replay panicked"))?)
    })?;
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The hits: a row for each room.
fn print(trace: &Trace, rooms: &[usize], table: &Table) -> Result<String, Failure> {
    let Trace { name, keys, blocks, .. } = trace;
    let mut text =
        format!("{name}: {} requests for {blocks} blocks; hits in percent\n", keys.len());
    write!(text, "{:>10}", "blocks")?;
    for (name, ..) in POLICIES {
        write!(text, "{name:>10}")?;
    }
    text.push('\n');
    for (room, row) in rooms.iter().zip(table) {
        write!(text, "{room:>10}")?;
        for hits in row {
            write!(text, "{hits:>10.1}")?;
        }
        text.push('\n');
    }
    Ok(text)
}

/// The gain of each part of the policy: a column for each room.
fn print_parts(rooms: &[usize], table: &Table, simulated: &Table) -> Result<String, Failure> {
    let mut text = format!("{:<36}", "gains in points, by blocks");
    for room in rooms {
        write!(text, "{room:>8}")?;
    }
    text.push('\n');
    let mut add = |part: &str, gain: &dyn Fn(usize) -> f64| -> Result<(), Failure> {
        write!(text, "{part:<36}")?;
        for at in 0..rooms.len() {
            // Without the sign of a zero.
            write!(text, "{:>8.1}", (10.0 * gain(at)).round() / 10.0 + 0.0)?;
        }
        text.push('\n');
        Ok(())
    };
    for rule in 1..=RULES {
        let name = format!("adaptive, over {}", POLICIES[rule].0);
        add(&name, &|at| table[at][0] - table[at][rule])?;
    }
    let best = |at: usize| table[at][1..=RULES].iter().copied().fold(0.0, f64::max);
    add("adaptive, over the best of these", &|at| table[at][0] - best(at))?;
    for (name, with, without) in PARTS {
        add(name, &|at| simulated[at][with] - simulated[at][without])?;
    }
    // How far the simulations are from the cache, which evicts up to eight blocks at a time.
    add("A2 simulated, over the cache's", &|at| simulated[at][0] - table[at][1])?;
    add("A2Small simulated, over the cache's", &|at| simulated[at][5] - table[at][2])?;
    Ok(text)
}

/// The curves: rooms on a logarithmic axis.
fn draw(trace: &Trace, rooms: &[usize], table: &[Vec<f64>]) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 400.0;
    const MARGIN: f64 = 50.0;
    let (least, most) = (rooms[0] as f64, rooms[rooms.len() - 1] as f64);
    let span = (most / least).ln().max(f64::MIN_POSITIVE);
    let x = |room: usize| MARGIN + (room as f64 / least).ln() / span * WIDTH;
    let y = |percent: f64| MARGIN + (1.0 - percent / 100.0) * HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n<text x=\"{MARGIN}\" y=\"25\">{}: hits in percent, by blocks in the \
         cache</text>\n",
        WIDTH + 3.0 * MARGIN,
        HEIGHT + 2.0 * MARGIN,
        trace.name.replace(['<', '>', '&'], "_"),
    );
    let mut add = |line: std::fmt::Arguments| writeln!(svg, "{line}").expect("a string takes it");
    for percent in [0.0, 20.0, 40.0, 60.0, 80.0, 100.0] {
        let (y, end) = (y(percent), MARGIN + WIDTH);
        add(format_args!("<path d=\"M{MARGIN} {y}H{end}\" stroke=\"#ddd\"/>"));
        add(format_args!("<text x=\"15\" y=\"{}\">{percent}</text>", y + 4.0));
    }
    for &room in rooms {
        let (x, y) = (x(room), MARGIN + HEIGHT + 18.0);
        add(format_args!("<text x=\"{x:.0}\" y=\"{y}\" text-anchor=\"middle\">{room}</text>"));
    }
    for (at, (name, colour, _)) in POLICIES.iter().enumerate() {
        let points: Vec<String> = rooms
            .iter()
            .zip(table)
            .map(|(&room, row)| format!("{:.1},{:.1}", x(room), y(row[at])))
            .collect();
        let points = points.join(" ");
        let (x, y) = (MARGIN + WIDTH + 10.0, MARGIN + 20.0 * at as f64);
        add(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        ));
        add(format_args!("<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{name}</text>"));
    }
    svg.push_str("</svg>\n");
    svg
}
