//! What was measured, kept line by line: a search that was ended at any moment goes on where it was.
//!
//! The first line binds the journal to machine, program and problems; each later line is one [`Entry`], written and
//! flushed to disk before the search goes on. A last line that was torn is cut off; any other damage is an error, and a
//! file that never was a journal is left alone. The search is a function of its seed and of these entries, so that taking
//! it up again is running it again with every measurement that is here looked up instead of made.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use flashcore_kernels::Tile;
use serde::{Deserialize, Serialize};

use super::TuneError;
use crate::{LabError, machine::Machine, referee::Finding, task::TaskSpec};

/// What journals are called inside.
const SCHEMA: &str = "flashcore-tune";
/// The version of the format.
const VERSION: u32 = 1;
/// Largest journal that is read.
const MOST_BYTES: u64 = 64 << 20;

/// How often, and after which pause, a journal that is in use is asked for.
const LOCK_ATTEMPTS: usize = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(25);

/// What a journal is bound to.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Header {
    schema: String,
    version: u32,
    /// Version of FlashCore.
    pub flashcore: String,
    /// Hash of the program.
    pub program: String,
    /// The machine, its GPU and driver.
    pub machine: Machine,
    /// What computes.
    pub backend: String,
    /// Seed of the inputs and of the search.
    pub seed: u64,
    /// The problems.
    pub tasks: Vec<TaskSpec>,
}

impl Header {
    /// A header of this program and machine.
    pub fn new(backend: String, seed: u64, tasks: Vec<TaskSpec>) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            flashcore: env!("CARGO_PKG_VERSION").to_owned(),
            program: crate::signature::program().unwrap_or_default(),
            machine: Machine::this(None),
            backend,
            seed,
            tasks,
        }
    }

    /// The first thing in which `self`, read from a file, differs from `now`: what, then, and now.
    fn difference(&self, now: &Self) -> Option<(&'static str, String, String)> {
        let text = |value: &dyn std::fmt::Debug| format!("{value:?}");
        let pairs = [
            ("version of the format", text(&self.version), text(&now.version)),
            ("version of FlashCore", text(&self.flashcore), text(&now.flashcore)),
            ("program", text(&self.program), text(&now.program)),
            ("machine", text(&self.machine), text(&now.machine)),
            ("backend", text(&self.backend), text(&now.backend)),
            ("seed", text(&self.seed), text(&now.seed)),
            ("problem", text(&self.tasks), text(&now.tasks)),
        ];
        pairs.into_iter().find(|(_, then, now)| then != now)
    }
}

/// One thing that was found out about a candidate.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Number of the problem.
    pub task: usize,
    /// The candidate.
    pub tile: Tile,
    /// What was found out.
    pub fact: Fact,
}

/// What was found out about a candidate.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Fact {
    /// It runs for the first time: the process may not survive that.
    Started,
    /// It cannot be built, or spills.
    Unbuildable(String),
    /// What its result was like.
    Judged(Finding),
    /// One turn of timing, in seconds per call.
    Timed {
        /// Number of the turn.
        turn: u32,
        /// Nearly independent times.
        times: Vec<f64>,
    },
    /// How busy the busiest unit was, from 0 to 1.
    Busy(f64),
    /// Both sides of the final against the plan's choice, on the problem itself or at an end of its class.
    Final {
        /// Which.
        stage: Stage,
        /// Times of the candidate.
        times: Vec<f64>,
        /// Times of the plan's choice.
        plan: Vec<f64>,
    },
}

/// What a final is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The problem.
    Problem,
    /// The smallest problem of its class.
    Least,
    /// The largest.
    Most,
}

/// What is known about one candidate.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Known {
    /// How often it ran for the first time.
    pub started: u32,
    /// Why it cannot be built.
    pub unbuildable: Option<String>,
    /// What its result was like.
    pub finding: Option<Finding>,
    /// Times of each turn.
    pub turns: HashMap<u32, Vec<f64>>,
    /// How busy the busiest unit was.
    pub busy: Option<f64>,
    /// Both sides of finals.
    pub finals: HashMap<Stage, [Vec<f64>; 2]>,
}

/// A journal that is being written; nobody else can write it meanwhile.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    known: HashMap<(usize, Tile), Known>,
    /// Entries that were there already.
    pub found: usize,
}

impl Journal {
    /// Opens the journal at `path`, or begins one; with `fresh` whatever is there is thrown away.
    pub fn open(path: &Path, header: &Header, fresh: bool) -> Result<Self, LabError> {
        let options = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = options().map_err(LabError::io("open", path))?;
        lock(&file, path)?;
        let mut journal = Self { path: path.to_owned(), file, known: HashMap::new(), found: 0 };
        if fresh {
            journal.cut(0)?;
        }
        let bytes = journal.bytes()?;
        if bytes.contains(&b'\n') {
            let text = journal.text(bytes)?;
            journal.take_up(header, &text)?;
        } else {
            journal.begin(header, &bytes)?;
        }
        Ok(journal)
    }

    fn bytes(&mut self) -> Result<Vec<u8>, LabError> {
        let mut bytes = Vec::new();
        let read = (&mut self.file).take(MOST_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(LabError::io("read", &self.path))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(self.damaged(0, format!("larger than {} MiB", MOST_BYTES >> 20)));
        }
        Ok(bytes)
    }

    fn text(&self, mut bytes: Vec<u8>) -> Result<String, LabError> {
        // What follows the last whole character was torn with its line.
        let whole = std::str::from_utf8(&bytes).map_or_else(|e| e.valid_up_to(), str::len);
        if bytes[whole..].contains(&b'\n') {
            return Err(self.damaged(0, "not text".to_owned()));
        }
        bytes.truncate(whole);
        String::from_utf8(bytes).map_err(|e| self.damaged(0, e.to_string()))
    }

    /// Writes the first line over as much of it as is there; a file that holds anything else is somebody's.
    fn begin(&mut self, header: &Header, found: &[u8]) -> Result<(), LabError> {
        let line = self.line(header)?;
        if !line.as_bytes().starts_with(found) {
            return Err(self.foreign());
        }
        self.cut(0)?;
        self.write(&line)
    }

    fn take_up(&mut self, header: &Header, text: &str) -> Result<(), LabError> {
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        let read: Header = serde_json::from_str(first).map_err(|e| self.damaged(1, e.to_string()))?;
        if read.schema != SCHEMA {
            return Err(self.foreign());
        }
        if let Some((what, then, now)) = read.difference(header) {
            return Err(TuneError::Mismatch { path: self.path.clone(), what, then, now }.into());
        }
        let mut end = first.len() + 1;
        for (n, line) in rest.split_inclusive('\n').enumerate() {
            let entry: Result<Entry, _> = serde_json::from_str(line);
            let whole = line.ends_with('\n');
            match entry {
                Ok(entry) if whole => self.learn(entry, n + 2)?,
                Err(error) if whole => return Err(self.damaged(n + 2, error.to_string())),
                _ => break,
            }
            end += line.len();
            self.found += 1;
        }
        self.cut(end as u64)
    }

    fn learn(&mut self, entry: Entry, line: usize) -> Result<(), LabError> {
        entry.check().map_err(|reason| self.damaged(line, reason))?;
        let known = self.known.entry((entry.task, entry.tile)).or_default();
        match entry.fact {
            Fact::Started => known.started += 1,
            Fact::Unbuildable(reason) => known.unbuildable = Some(reason),
            Fact::Judged(finding) => known.finding = Some(finding),
            Fact::Timed { turn, times } => drop(known.turns.insert(turn, times)),
            Fact::Busy(share) => known.busy = Some(share),
            Fact::Final { stage, times, plan } => drop(known.finals.insert(stage, [times, plan])),
        }
        Ok(())
    }

    /// What is known about a candidate.
    pub fn known(&self, task: usize, tile: &Tile) -> Option<&Known> {
        self.known.get(&(task, *tile))
    }

    /// Adds an entry; it is on disk when this returns.
    pub fn add(&mut self, entry: Entry) -> Result<(), LabError> {
        let line = self.line(&entry)?;
        self.write(&line)?;
        self.learn(entry, 0)
    }

    fn line(&self, what: &impl Serialize) -> Result<String, LabError> {
        let text = serde_json::to_string(what).map_err(|e| self.damaged(0, e.to_string()))?;
        Ok(text + "\n")
    }

    fn write(&mut self, line: &str) -> Result<(), LabError> {
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(LabError::io("write", &self.path))
    }

    /// Leaves `len` bytes and goes on writing behind them.
    fn cut(&mut self, len: u64) -> Result<(), LabError> {
        let cut = self.file.set_len(len).and_then(|()| self.file.seek(SeekFrom::Start(len)).map(drop));
        cut.map_err(LabError::io("write", &self.path))
    }

    fn foreign(&self) -> LabError {
        self.damaged(1, "not a journal of `flashcore tune`".to_owned())
    }

    fn damaged(&self, line: usize, reason: String) -> LabError {
        TuneError::Damaged { path: self.path.clone(), line, reason }.into()
    }
}

/// Keeps others out; a search that is just ending has a moment to do so.
fn lock(file: &File, path: &Path) -> Result<(), LabError> {
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(LabError::io("lock", path)(error)),
        }
    }
    Err(TuneError::Busy { path: path.to_owned() }.into())
}

impl Entry {
    fn check(&self) -> Result<(), String> {
        self.tile.check().map_err(|misfit| misfit.to_string())?;
        let times: Vec<f64> = match &self.fact {
            Fact::Timed { times, .. } => times.clone(),
            Fact::Final { times, plan, .. } => [&times[..], plan].concat(),
            Fact::Busy(share) => vec![share + f64::MIN_POSITIVE],
            Fact::Started | Fact::Unbuildable(_) | Fact::Judged(_) => Vec::new(),
        };
        match times.into_iter().find(|time| !(*time > 0.0 && time.is_finite())) {
            Some(time) => Err(format!("{time} is not a time")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Mask};
    use flashcore_kernels::CpuTile;
    use std::fs;

    use crate::task::Task;

    fn header(seed: u64) -> Header {
        let task = Task::square(DType::F32, [1, 2, 64, 32], Mask::NONE).unwrap();
        Header::new("cpu".to_owned(), seed, vec![task.spec().clone()])
    }

    fn entry(keys: u32, turn: u32) -> Entry {
        let fact = Fact::Timed { turn, times: vec![1e-3, 2e-3] };
        Entry { task: 0, tile: Tile::Cpu(CpuTile { keys, chunk: 1 }), fact }
    }

    /// A journal with three entries, and its bytes.
    fn written() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut journal = Journal::open(&path, &header(1), false).unwrap();
        for (keys, turn) in [(32, 0), (64, 0), (32, 1)] {
            journal.add(entry(keys, turn)).unwrap();
        }
        drop(journal);
        let bytes = fs::read(&path).unwrap();
        (folder, path, bytes)
    }

    #[test]
    fn cut_anywhere_it_gives_back_every_whole_line() {
        let (_folder, path, bytes) = written();
        let header = header(1);
        for end in (0..=bytes.len()).filter(|end| end % 7 == 0 || bytes.len() - end < 40) {
            fs::write(&path, &bytes[..end]).unwrap();
            let lines = bytes[..end].iter().filter(|byte| **byte == b'\n').count();
            let mut journal = Journal::open(&path, &header, false).unwrap();
            assert_eq!(journal.found, lines.saturating_sub(1), "cut at {end}");
            journal.add(entry(128, 0)).unwrap();
            drop(journal);
            let again = Journal::open(&path, &header, false).unwrap();
            assert_eq!(again.found, lines.saturating_sub(1) + 1, "cut at {end}");
        }
        let whole = Journal::open(&path, &header, false).unwrap();
        let known = whole.known(0, &Tile::Cpu(CpuTile { keys: 32, chunk: 1 })).unwrap();
        assert_eq!(known.turns.len(), 2);
    }

    #[test]
    fn another_machine_program_or_problem_is_refused() {
        let (_folder, path, bytes) = written();
        let refused = |header: &Header| Journal::open(&path, header, false).unwrap_err().to_string();
        assert!(refused(&header(2)).contains("seed"));
        let mut other = header(1);
        other.machine.gpu = Some("NVIDIA H200".to_owned());
        assert!(refused(&other).contains("H200") && refused(&other).contains("--fresh"));
        assert!(refused(&Header { program: "0".to_owned(), ..header(1) }).contains("program"));
        assert!(refused(&Header { tasks: Vec::new(), ..header(1) }).contains("problem"));
        assert_eq!(fs::read(&path).unwrap(), bytes, "a refused journal is left alone");
        assert_eq!(Journal::open(&path, &header(2), true).unwrap().found, 0, "unless it shall go");
    }

    #[test]
    fn damage_is_told_from_torn_ends() {
        let (_folder, path, bytes) = written();
        let text = String::from_utf8(bytes).unwrap();
        for (from, to, words) in [
            ("flashcore-tune", "flashcore-bank", "not a journal"),
            ("\"turn\":0", "\"turn\":-1", "line 2"),
            ("0.001", "-1.0", "not a time"),
            ("\"keys\":32", "\"keys\":33", "keys"),
            ("\"task\":0", "\"code\":0", "line 2"),
        ] {
            fs::write(&path, text.replacen(from, to, 1)).unwrap();
            let error = Journal::open(&path, &header(1), false).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        fs::write(&path, [b"\xff\xff\n", text.as_bytes()].concat()).unwrap();
        assert!(Journal::open(&path, &header(1), false).is_err());
    }

    #[test]
    fn files_of_others_are_left_alone() {
        let (_folder, path, bytes) = written();
        let first = bytes.iter().position(|byte| *byte == b'\n').unwrap();
        let torn_and_more = [&bytes[..first / 2], b"notes"].concat();
        for other in [&b"notes"[..], b"\xff\xfe", b"{\"a\":1}", b"\n", b"notes\n", &torn_and_more] {
            fs::write(&path, other).unwrap();
            let error = Journal::open(&path, &header(1), false).unwrap_err().to_string();
            assert!(error.contains("damaged") && error.contains("--fresh"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), other, "nobody asked to lose it");
        }
        assert!(Journal::open(&path, &header(1), true).is_ok());
    }

    #[test]
    fn two_searches_do_not_share_a_journal() {
        let (_folder, path, _) = written();
        let _first = Journal::open(&path, &header(1), false).unwrap();
        let second = Journal::open(&path, &header(1), false).unwrap_err().to_string();
        assert!(second.contains("in use"), "{second}");
    }
}
