//! Basic blocks of a kernel: successors, reachability, post-dominators.

use super::{Report, Rule};
use crate::{
    ident::Name,
    inst::{Inst, Operand},
    module::{Kernel, Statement},
    op::Op,
    table::{Access, Form},
};
use std::{collections::HashMap, ops::Range};

/// The block that stands for the end of every thread.
pub(super) const EXIT: usize = usize::MAX;

/// A run of statements with one entry and one end.
pub(super) struct Block {
    /// Statements, by index.
    pub(super) statements: Range<usize>,
    /// Blocks that may follow; [`EXIT`] among them.
    pub(super) next: Vec<usize>,
    /// Whether control falls off the end of the kernel here.
    pub(super) falls_off: bool,
}

/// An instruction with its form, how it uses its operands, and its place.
pub(super) struct Step<'f> {
    pub(super) statement: usize,
    pub(super) inst: &'f Inst,
    pub(super) form: Form,
    pub(super) accesses: &'f [(Access, &'f Operand)],
}

/// What is looked up once for each instruction and asked for by every analysis, many times over.
struct Known<'k> {
    form: Form,
    accesses: Vec<(Access, &'k Operand)>,
}

/// The control flow of a kernel whose instructions are all in the table.
pub(super) struct Flow<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) blocks: Vec<Block>,
    known: Vec<Option<Known<'k>>>,
    /// For each block the nearest block that every way to the end passes; [`EXIT`] if there is none.
    pub(super) post_dominator: Vec<usize>,
}

/// Whether the statement ends a block.
fn ends_block(form: &Form) -> bool {
    form.row.terminator
}

impl<'k> Flow<'k> {
    /// Splits the body into blocks.
    pub(super) fn of(kernel: &'k Kernel) -> Self {
        let known: Vec<_> = kernel.body.iter().map(known).collect();
        let starts = block_starts(kernel, &known);
        let targets: HashMap<&str, usize> = labels(kernel)
            .map(|(name, at)| (name, starts.partition_point(|&start| start <= at) - 1))
            .collect();
        let mut flow = Self { kernel, blocks: Vec::new(), known, post_dominator: Vec::new() };
        for (i, &start) in starts.iter().enumerate() {
            let end = starts.get(i + 1).copied().unwrap_or(kernel.body.len());
            let block = flow.block(start..end, i, starts.len(), &targets);
            flow.blocks.push(block);
        }
        flow.post_dominator = flow.post_dominators();
        flow
    }

    fn block(
        &self,
        statements: Range<usize>,
        index: usize,
        count: usize,
        targets: &HashMap<&str, usize>,
    ) -> Block {
        let mut next = Vec::new();
        let mut falls_through = true;
        if let Some(last) = self.step(statements.end.wrapping_sub(1)).filter(|s| ends_block(&s.form)) {
            let labels = last.inst.operands.iter().flat_map(|o| self.labels_of(last.inst, o));
            next.extend(labels.filter_map(|name| targets.get(name.as_str()).copied()));
            // A trap ends the whole grid: no thread meets another behind it, so it is no way to the end.
            if !matches!(last.inst.op, Op::Bra | Op::BrxIdx | Op::Trap) {
                next.push(EXIT);
            }
            falls_through = last.inst.guard.is_some();
        }
        let last_block = index + 1 == count;
        if falls_through {
            next.push(if last_block { EXIT } else { index + 1 });
        }
        next.sort_unstable();
        next.dedup();
        Block { statements, next, falls_off: falls_through && last_block }
    }

    /// The labels that a branch may go to by this operand.
    fn labels_of<'o>(&self, inst: &Inst, operand: &'o Operand) -> &'o [Name]
    where
        'k: 'o,
    {
        match operand {
            Operand::Label(name) => std::slice::from_ref(name),
            Operand::Symbol(name) if inst.op == Op::BrxIdx => self.kernel.branch_targets(name),
            _ => &[],
        }
    }

    /// The instruction at a statement.
    pub(super) fn step(&self, statement: usize) -> Option<Step<'_>> {
        let Statement::Inst(inst) = self.kernel.body.get(statement)? else { return None };
        let Known { form, accesses } = self.known.get(statement)?.as_ref()?;
        Some(Step { statement, inst, form: *form, accesses })
    }

    /// The instructions of a block.
    pub(super) fn steps(&self, block: usize) -> impl Iterator<Item = Step<'_>> {
        self.blocks[block].statements.clone().filter_map(|s| self.step(s))
    }

    /// The branch (or exit) that ends a block and may part its threads.
    pub(super) fn branch(&self, block: usize) -> Option<Step<'_>> {
        let last = self.step(self.blocks[block].statements.end.wrapping_sub(1))?;
        let parts = last.inst.guard.is_some() || last.inst.op == Op::BrxIdx;
        (ends_block(&last.form) && parts).then_some(last)
    }

    /// Blocks reachable from `from`, without going through `stop`.
    pub(super) fn reachable(&self, from: &[usize], stop: usize) -> Vec<bool> {
        let mut seen = vec![false; self.blocks.len()];
        let mut todo: Vec<usize> = from.to_vec();
        while let Some(block) = todo.pop() {
            if block == EXIT || block == stop || seen[block] {
                continue;
            }
            seen[block] = true;
            todo.extend(&self.blocks[block].next);
        }
        seen
    }

    /// Immediate post-dominators, by Cooper, Harvey and Kennedy's algorithm on the reversed graph.
    fn post_dominators(&self) -> Vec<usize> {
        let order = self.exit_first_order();
        let mut rank = vec![usize::MAX; self.blocks.len()];
        order.iter().enumerate().for_each(|(position, &block)| rank[block] = position);
        let mut parent: Vec<Option<usize>> = vec![None; self.blocks.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for &block in &order {
                let known =
                    self.blocks[block].next.iter().copied().filter(|&n| n == EXIT || parent[n].is_some());
                let meet = known.reduce(|a, b| meet(a, b, &rank, &parent));
                if meet.is_some() && meet != parent[block] {
                    parent[block] = meet;
                    changed = true;
                }
            }
        }
        // A block that never ends (an endless loop) has no post-dominator but the end itself.
        parent.into_iter().map(|p| p.unwrap_or(EXIT)).collect()
    }

    /// Blocks in reverse post-order of the reversed graph: those near the end first.
    fn exit_first_order(&self) -> Vec<usize> {
        let mut before = vec![Vec::new(); self.blocks.len()];
        let mut roots = Vec::new();
        for (block, b) in self.blocks.iter().enumerate() {
            for &next in &b.next {
                if next == EXIT { roots.push(block) } else { before[next].push(block) }
            }
        }
        let mut seen = vec![false; self.blocks.len()];
        let mut finished = Vec::new();
        let mut stack: Vec<(usize, bool)> = roots.into_iter().map(|r| (r, false)).collect();
        while let Some((block, done)) = stack.pop() {
            if done {
                finished.push(block);
            } else if !std::mem::replace(&mut seen[block], true) {
                stack.push((block, true));
                stack.extend(before[block].iter().map(|&b| (b, false)));
            }
        }
        finished.reverse();
        finished
    }
}

/// The nearest common ancestor in the post-dominator tree.
fn meet(mut a: usize, mut b: usize, rank: &[usize], parent: &[Option<usize>]) -> usize {
    while a != b {
        if a == EXIT || b == EXIT {
            return EXIT;
        }
        if rank[a] > rank[b] {
            a = parent[a].unwrap_or(EXIT);
        } else {
            b = parent[b].unwrap_or(EXIT);
        }
    }
    a
}

fn known(statement: &Statement) -> Option<Known<'_>> {
    let Statement::Inst(inst) = statement else { return None };
    let form = inst.form().ok()?;
    Some(Known { form, accesses: form.accesses(inst) })
}

fn labels(kernel: &Kernel) -> impl Iterator<Item = (&str, usize)> {
    kernel.body.iter().enumerate().filter_map(|(at, statement)| match statement {
        Statement::Label(name) => Some((name.as_str(), at)),
        Statement::Inst(_) | Statement::Unknown(_) => None,
    })
}

fn block_starts(kernel: &Kernel, known: &[Option<Known<'_>>]) -> Vec<usize> {
    let is_label = |i: usize| matches!(kernel.body[i], Statement::Label(_));
    let after_end = |i: usize| i > 0 && known[i - 1].as_ref().is_some_and(|known| ends_block(&known.form));
    let starts = |i: usize| i == 0 || after_end(i) || (is_label(i) && !is_label(i - 1));
    (0..kernel.body.len()).filter(|&i| starts(i)).collect()
}

/// Reports unreachable code and a kernel without end.
pub(super) fn check(flow: &Flow<'_>, report: &mut Report<'_>) {
    let reached = flow.reachable(&[0], EXIT);
    if flow.blocks.is_empty() {
        return report
            .on_kernel(Rule::Terminator, "the kernel has no statement: it needs at least `ret`".into());
    }
    for (block, _) in reached.iter().enumerate().filter(|(_, reached)| !**reached) {
        if let Some(step) = flow.steps(block).next() {
            report.at(Rule::Unreachable, step.statement, "this instruction is unreachable".into());
        }
    }
    if let Some(last) = flow.blocks.iter().zip(&reached).find(|(b, reached)| b.falls_off && **reached) {
        let statement = last.0.statements.end - 1;
        report.at(
            Rule::Terminator,
            statement,
            "control falls off the end of the kernel; end it with `ret`".into(),
        );
    }
}
