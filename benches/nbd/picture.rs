//! The picture of the repository's first page: bars of the rows that decide a target.
//!
//! The colours follow the reader's scheme, light or dark, by a style sheet inside the picture. Each row has
//! a scale of its own: the rows differ by a factor of 60, and the comparison is inside a row.

use std::fmt;

use harness::Header;

use crate::rows::Row;

const WIDTH: f64 = 760.0;
/// The position at which the bars begin; the names of the rows stand before them.
const BARS: f64 = 200.0;
/// The longest bar; its figure stands behind it.
const LONGEST: f64 = 500.0;
const BAR: f64 = 15.0;
const HEAD: f64 = 60.0;
const ROW: f64 = BAR * 3.0 + 13.0;
const FOOT: f64 = 44.0;
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#59636e}.ink{fill:#1f2328}\
    .title{font-size:16px}.title,.name{font-weight:600}.foot{font-size:11px}.a{fill:#2a78d6}\
    .b{fill:#c9793f}.c{fill:#8c959f}@media(prefers-color-scheme:dark){text{fill:#9198a1}\
    .ink{fill:#f0f6fc}.a{fill:#4493f8}.b{fill:#db8b4f}.c{fill:#6e7681}}";
/// The servers in the order of a row, and their classes in the style sheet.
const SERVERS: [(&str, &str); 3] = [("offlock-nbd", "a"), ("qemu-nbd", "b"), ("nbdkit", "c")];

/// Rows with the medians of their servers, and where they were measured.
pub(crate) struct Picture {
    rows: Vec<Bars>,
    origin: [String; 2],
}

/// A row: its name in three lines, and reads per second in the order of [`SERVERS`].
struct Bars {
    name: [String; 3],
    reads: Vec<f64>,
}

impl Picture {
    /// Takes those of `rows` that decide a target, and in which all their servers were measured.
    pub(crate) fn new(rows: &[Row], header: &Header) -> Self {
        let bars = |row: &Row| {
            let reads = (0..row.servers.len()).map(|at| row.median(at, |window| window.reads.iops));
            let reads = reads.collect::<Option<Vec<_>>>()?;
            row.lacks_no_server().then(|| Bars { name: name(row), reads })
        };
        let rounds = rows.first().map_or(0, |row| row.rounds.done());
        let Header { cpu, cores, kernel, commit, command, .. } = header;
        let kernel = kernel.split('-').next().unwrap_or(kernel);
        let origin = [
            format!(
                "{cpu}, {cores} CPUs, Linux {kernel}, commit {commit}; medians of {rounds} rounds"
            ),
            format!("{command}. qemu-nbd: io_uring, or native AIO for O_DIRECT. nbdkit: file"),
        ];
        Self { rows: rows.iter().filter_map(bars).collect(), origin }
    }
}

impl fmt::Display for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let height = HEAD + ROW * self.rows.len() as f64 + FOOT;
        writeln!(
            f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n<style>{STYLE}</style>\n\
             <text x=\"8\" y=\"22\" class=\"ink title\">Reads that an NBD server answers in a second, \
             in thousands</text>\n<text x=\"8\" y=\"41\">Longer is better. Each row has its own \
             scale.</text>"
        )?;
        let mut at = 440.0;
        for (name, class) in SERVERS {
            writeln!(
                f,
                "<rect x=\"{at}\" y=\"31\" width=\"12\" height=\"12\" rx=\"2\" class=\"{class}\"/>\
                 <text x=\"{}\" y=\"41\" class=\"ink\">{name}</text>",
                at + 18.0
            )?;
            at += 42.0 + 8.0 * name.len() as f64;
        }
        for (at, bars) in self.rows.iter().enumerate() {
            bars.draw(f, HEAD + ROW * at as f64)?;
        }
        let foot = height - FOOT + 14.0;
        for (line, text) in self.origin.iter().enumerate() {
            let y = foot + 16.0 * line as f64;
            writeln!(f, "<text x=\"8\" y=\"{y}\" class=\"foot\">{text}</text>")?;
        }
        writeln!(f, "</svg>")
    }
}

impl Bars {
    fn draw(&self, f: &mut fmt::Formatter<'_>, top: f64) -> fmt::Result {
        for (line, (text, class)) in self.name.iter().zip(["ink name", "ink", ""]).enumerate() {
            let y = top + BAR * line as f64 + 11.0;
            write!(f, "<text x=\"8\" y=\"{y}\" class=\"{class}\">{text}</text>")?;
        }
        let most = self.reads.iter().copied().fold(1.0, f64::max);
        for (server, (reads, (name, class))) in self.reads.iter().zip(SERVERS).enumerate() {
            let y = top + BAR * server as f64;
            let wide = LONGEST * reads / most;
            let ink = if server == 0 { "ink name" } else { "" };
            write!(
                f,
                "<rect x=\"{BARS}\" y=\"{y}\" width=\"{wide:.1}\" height=\"{}\" rx=\"2\" \
                 class=\"{class}\"><title>{name}</title></rect>\
                 <text x=\"{:.1}\" y=\"{}\" class=\"{ink}\">{:.0}</text>",
                BAR - 2.0,
                BARS + wide + 7.0,
                y + 11.0,
                reads / 1e3
            )?;
        }
        writeln!(f)
    }
}

/// A row in words: its blocks, its requests in flight, and the client and the CPUs.
fn name(row: &Row) -> [String; 3] {
    let load = &row.load;
    let order = if load.rw == "read" { "in sequence" } else { "at random" };
    let direct = if load.direct { ", O_DIRECT" } else { "" };
    let size = load.block.replace('k', " KiB");
    let requests = match (load.depth, load.connections) {
        (1, 1) => "one at a time".to_string(),
        (depth, 1) => format!("{depth} in flight"),
        (depth, connections) => format!("{connections} connections, {depth} each"),
    };
    let client = if load.light { "light client" } else { "fio" };
    let cpus = if load.cpus == 1 { "one CPU" } else { "two CPUs" };
    [format!("{size} {order}"), requests + direct, format!("{client}, {cpus}")]
}
