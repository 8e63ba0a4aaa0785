//! Functions of a program: which of them a kernel may reach, their decoding order, and stack depth.

use super::{
    RegisterCounts,
    operand::FRAME_ALIGN,
    uop::{Builtin, Piece},
};
use flashcore_ptx::{
    inst::{Base, Inst, Operand},
    module::{Initial, Kernel, Module},
    op::Op,
};
use std::collections::BTreeSet;

/// Addresses of functions: a window of the generic address space that holds no memory.
pub(crate) const FUNCTIONS: u64 = 0x1400_0000_0000;
/// Distance between the addresses of two functions.
const FUNCTION_BYTES: u64 = 16;
/// Bytes that recursion may take of each thread's stack beyond what its frames need once.
const RECURSION_BYTES: u32 = 64 * 1024;

/// A function that a kernel may call.
#[derive(Clone, Debug)]
pub(crate) struct Routine {
    /// Its index in the module.
    pub(crate) function: usize,
    pub(crate) name: String,
    /// Where it begins.
    pub(crate) entry: u32,
    /// Where arguments and result lie in its frame.
    pub(crate) params: Vec<Piece>,
    pub(crate) result: Option<Piece>,
    /// Its registers: from here to there.
    pub(crate) registers: (RegisterCounts, RegisterCounts),
    /// Whether it may be called again before it has returned.
    pub(crate) recursive: bool,
}

/// The address of a function of the module.
pub(crate) const fn function_address(index: usize) -> u64 {
    FUNCTIONS + FUNCTION_BYTES * (index as u64 + 1)
}

/// The function at an address.
pub(crate) const fn function_at(address: u64) -> Option<usize> {
    let offset = address.wrapping_sub(FUNCTIONS);
    let fits = offset >= FUNCTION_BYTES && offset < 1 << 32 && offset.is_multiple_of(FUNCTION_BYTES);
    if fits { Some((offset / FUNCTION_BYTES - 1) as usize) } else { None }
}

/// The function of that name that has a body, else one that is only declared.
pub(super) fn find(module: &Module, name: &str) -> Option<usize> {
    let named = |defined: bool| {
        module.functions.iter().position(|f| f.defined == defined && f.code.name.as_str() == name)
    };
    named(true).or_else(|| named(false))
}

/// The function of that name that the system provides.
pub(super) fn builtin(name: &str) -> Option<Builtin> {
    match name {
        "vprintf" => Some(Builtin::Print),
        "__assertfail" => Some(Builtin::Assert),
        _ => None,
    }
}

/// Who calls whom.
pub(super) struct CallGraph<'m> {
    module: &'m Module,
    /// Functions whose addresses are values somewhere: an indirect call may reach each of them.
    pointed_at: BTreeSet<usize>,
}

impl<'m> CallGraph<'m> {
    pub(super) fn new(module: &'m Module) -> Self {
        let initials = module.variables.iter().flat_map(|v| &v.init).filter_map(|value| match value {
            Initial::Address { name, .. } => Some(name.as_str()),
            Initial::Value(_) => None,
        });
        let instructions = module.units().flat_map(|(_, unit)| unit.instructions());
        let values = instructions.filter(|(_, inst)| inst.op != Op::Call).flat_map(|(_, inst)| symbols(inst));
        let names: Vec<_> = initials.chain(values).collect();
        let pointed_at = names.into_iter().filter_map(|name| find(module, name)).collect();
        Self { module, pointed_at }
    }

    /// The functions that `code` may call itself.
    fn callees(&self, code: &Kernel) -> BTreeSet<usize> {
        let calls = code.instructions().filter(|(_, inst)| inst.op == Op::Call);
        let mut found = BTreeSet::new();
        for (_, inst) in calls {
            match callee(inst) {
                Some(Operand::Symbol(name)) => found.extend(find(self.module, name.as_str())),
                _ => found.extend(&self.pointed_at),
            }
        }
        found.retain(|&index| self.module.functions[index].defined);
        found
    }

    fn code(&self, index: usize) -> &'m Kernel {
        &self.module.functions[index].code
    }

    /// The functions that `kernel` may reach, callees before callers.
    pub(super) fn reachable(&self, kernel: &Kernel) -> Vec<usize> {
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        let mut todo: Vec<(usize, bool)> = self.callees(kernel).into_iter().map(|i| (i, false)).collect();
        while let Some((index, done)) = todo.pop() {
            if done {
                order.push(index);
            } else if seen.insert(index) {
                todo.push((index, true));
                todo.extend(self.callees(self.code(index)).into_iter().map(|i| (i, false)));
            }
        }
        order
    }

    /// Whether a function may be called again before it has returned.
    pub(super) fn is_recursive(&self, index: usize) -> bool {
        self.reachable(self.code(index)).contains(&index)
    }

    /// Bytes of a thread's stack, given those of each frame; the kernel's lies below all others.
    pub(super) fn stack_bytes(&self, order: &[usize], frames: &[u32], kernel: u32) -> u32 {
        if order.is_empty() {
            return kernel;
        }
        // Callees come first, so that what each function needs with all that it calls is known when it is asked for.
        let mut needs: Vec<u32> = Vec::new();
        for (&index, &frame) in order.iter().zip(frames) {
            let callees = self.callees(self.code(index));
            let deepest = callees.iter().filter_map(|c| needs.get(order.iter().position(|o| o == c)?));
            needs.push(frame.saturating_add(deepest.max().copied().unwrap_or(0)));
        }
        let recursion = if order.iter().any(|&index| self.is_recursive(index)) { RECURSION_BYTES } else { 0 };
        let kernel = kernel.next_multiple_of(FRAME_ALIGN);
        needs.iter().max().copied().unwrap_or(0).saturating_add(kernel).saturating_add(recursion)
    }
}

/// The operand that says who is called.
pub(super) fn callee(inst: &Inst) -> Option<&Operand> {
    inst.operands.iter().find(|o| !matches!(o, Operand::Group(_)))
}

/// Names that an instruction uses as values.
fn symbols(inst: &Inst) -> impl Iterator<Item = &str> {
    inst.operands.iter().filter_map(|operand| match operand {
        Operand::Symbol(name) | Operand::Offset(name, _) => Some(name.as_str()),
        Operand::Address(address) => match &address.base {
            Base::Symbol(name) => Some(name.as_str()),
            _ => None,
        },
        _ => None,
    })
}
