//! Everything outside of kernels: version, target, variables, heads of kernels and functions. Calls
//! [`super::body`] for the rest.

use super::{Cursor, ParseError, ParseErrorKind, Parsed, body, error_at, lexer::TokenKind, operand, shown};
use crate::{
    ident::Name,
    inst::RegId,
    module::{Directives, Function, Initial, Kernel, KernelParam, Length, Linkage, Module, Space, Variable},
    provenance::{Provenance, Unit},
    target::Target,
    types::ScalarType,
    version::Version,
};
use std::collections::{HashMap, HashSet};

/// State of reading a module.
pub(super) struct Reader<'a, 't> {
    pub(super) cursor: Cursor<'a, 't>,
    /// Name of the text, for provenance.
    pub(super) file: &'a str,
    /// `.file` directives by number.
    pub(super) files: HashMap<u32, String>,
    pub(super) provenance: Provenance,
    /// Wrong instructions that were skipped.
    pub(super) errors: Vec<ParseError>,
    /// Whether instructions that the table lacks are kept.
    pub(super) lenient: bool,
}

/// Names of one kernel: what is visible in each open scope, and what is taken.
#[derive(Default)]
pub(super) struct Names {
    pub(super) registers: Vec<HashMap<String, RegId>>,
    pub(super) symbols: Vec<HashMap<String, Name>>,
    pub(super) labels: Vec<HashMap<String, Name>>,
    pub(super) taken: HashSet<String>,
    /// The suffix to try next for a name that is taken.
    suffixes: HashMap<String, u32>,
}

impl Names {
    /// The names that `kernel` sees before its body begins.
    fn of(module: &Module, kernel: &Kernel) -> Self {
        let globals = module.variables.iter().map(|v| &v.name);
        let known = globals.chain(kernel.params.iter().chain(&kernel.returns).map(|p| &p.name));
        let known: HashMap<_, _> = known.map(|n| (n.as_str().to_owned(), n.clone())).collect();
        let functions = module.functions.iter().map(|f| f.code.name.as_str().to_owned());
        let taken = known.keys().cloned().chain(functions).collect();
        Self { symbols: vec![known], taken, ..Self::default() }
    }

    /// A name for what is called `text`, not taken by anything in another scope.
    pub(super) fn unique(&mut self, text: &str) -> Option<Name> {
        let mut candidate = text.to_owned();
        while !self.taken.insert(candidate.clone()) {
            let suffix = self.suffixes.entry(text.to_owned()).or_default();
            *suffix += 1;
            candidate = format!("{text}_{suffix}");
        }
        Name::new(candidate).ok()
    }
}

/// Reads a whole module; also returns the errors after which it continued.
pub(super) fn module(
    cursor: Cursor<'_, '_>,
    file: &str,
    lenient: bool,
) -> (Result<Parsed, ParseError>, Vec<ParseError>) {
    let provenance = Provenance::default();
    let files = files_of(&cursor);
    let mut reader = Reader { cursor, file, files, provenance, errors: Vec::new(), lenient };
    let module = reader.module();
    (module.map(|module| Parsed { module, provenance: reader.provenance }), reader.errors)
}

/// The `.file` directives of a text, by number: nvcc writes them behind everything that refers to them.
fn files_of(cursor: &Cursor<'_, '_>) -> HashMap<u32, String> {
    let entries = cursor.tokens.windows(3).filter_map(|tokens| match tokens {
        [directive, number, name] if directive.text == ".file" && name.kind == TokenKind::String => {
            Some((number.text.parse().ok()?, name.text.trim_matches('"').to_owned()))
        }
        _ => None,
    });
    entries.collect()
}

impl Reader<'_, '_> {
    fn module(&mut self) -> Result<Module, ParseError> {
        let mut module = self.head()?;
        while self.cursor.peek(0).kind != TokenKind::End {
            self.item(&mut module)?;
        }
        Ok(module)
    }

    fn head(&mut self) -> Result<Module, ParseError> {
        self.cursor.expect(".version")?;
        let version = self.version()?;
        self.cursor.expect(".target")?;
        let target = self.target()?;
        if self.cursor.eat(".address_size") && self.cursor.number()? != 64 {
            return self
                .cursor
                .error_here(ParseErrorKind::Unsupported("an address size other than 64".into()));
        }
        Ok(Module::with_version(version, target))
    }

    fn version(&mut self) -> Result<Version, ParseError> {
        let token = self.cursor.expect_kind(TokenKind::Number, "a version such as 8.0")?;
        let parts = token.text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        match parts {
            Some((major, minor)) => Ok(Version { major, minor }),
            None => error_at(token, ParseErrorKind::Number(token.text.into())),
        }
    }

    fn target(&mut self) -> Result<Target, ParseError> {
        let token = self.cursor.expect_kind(TokenKind::Word, "a target such as sm_90a")?;
        while self.cursor.eat(",") {
            self.cursor.expect_kind(TokenKind::Word, "a target option")?;
        }
        let expected = "a target such as sm_90a".into();
        let unknown = || error_at(token, ParseErrorKind::Expected { expected, found: shown(token) });
        Target::parse_nearest(token.text).map_or_else(unknown, Ok)
    }

    fn item(&mut self, module: &mut Module) -> Result<(), ParseError> {
        let token = self.cursor.peek(0);
        match token.text {
            ".file" | ".loc" => {
                self.cursor.skip_line(token);
                Ok(())
            }
            ".pragma" => self.cursor.skip_past(";"),
            ".section" => self.cursor.skip_past("}"),
            ";" => self.cursor.expect(";"),
            _ => self.linked_item(module),
        }
    }

    fn linked_item(&mut self, module: &mut Module) -> Result<(), ParseError> {
        let linkage = self.linkage()?;
        let token = self.cursor.peek(0);
        match token.text {
            ".entry" => {
                let kernel = self.kernel(module)?;
                module.kernels.push(kernel);
                Ok(())
            }
            ".func" => self.function(module, linkage),
            ".alias" => self.cursor.error_here(ParseErrorKind::Unsupported("`.alias`".into())),
            text => match space(text).filter(|space| *space != Space::Param) {
                Some(space) => self.variables(linkage, space, &mut |v| {
                    module.variables.push(v);
                    true
                }),
                None => self.cursor.expected("`.entry`, `.func`, `.global`, `.shared` or `.const`"),
            },
        }
    }

    fn linkage(&mut self) -> Result<Linkage, ParseError> {
        let linkage = match self.cursor.peek(0).text {
            ".visible" => Linkage::Visible,
            ".extern" => Linkage::Extern,
            ".weak" => Linkage::Weak,
            // A variable that several files share: here there is one file, which has it.
            ".common" => Linkage::Visible,
            _ => return Ok(Linkage::Private),
        };
        self.cursor.bump();
        Ok(linkage)
    }

    pub(super) fn name(&mut self) -> Result<Name, ParseError> {
        let token = self.cursor.expect_kind(TokenKind::Word, "a name")?;
        let bad = ParseErrorKind::Expected { expected: "a name".into(), found: shown(token) };
        Name::new(token.text).or_else(|_| error_at(token, bad))
    }

    pub(super) fn scalar_type(&mut self) -> Result<ScalarType, ParseError> {
        let token = self.cursor.peek(0);
        match token.text.strip_prefix('.').and_then(ScalarType::parse) {
            Some(ty) => {
                self.cursor.bump();
                Ok(ty)
            }
            None => self.cursor.expected("a type such as `.b32`"),
        }
    }

    fn align(&mut self) -> Result<Option<u32>, ParseError> {
        if !self.cursor.eat(".align") {
            return Ok(None);
        }
        let token = self.cursor.peek(0);
        let align = self.cursor.number()?;
        let sane = align.is_power_of_two() && align <= 1 << 20;
        if sane { Ok(Some(align)) } else { error_at(token, ParseErrorKind::Number(token.text.into())) }
    }

    /// `.space .align n .type name[len] = init, name…;`, each handed to `keep`, which says whether its name was free.
    pub(super) fn variables(
        &mut self,
        linkage: Linkage,
        space: Space,
        keep: &mut dyn FnMut(Variable) -> bool,
    ) -> Result<(), ParseError> {
        self.cursor.bump();
        self.attribute()?;
        let align = self.align()?;
        self.refuse_textures()?;
        let ty = self.scalar_type()?;
        loop {
            let at = self.cursor.peek(0);
            let name = self.name()?;
            let len = self.length()?;
            let init = self.initial_values()?;
            if !keep(Variable { linkage, space, align, ty, name, len, init }) {
                return error_at(at, ParseErrorKind::Duplicate(at.text.into()));
            }
            if !self.cursor.eat(",") {
                return self.cursor.expect(";");
            }
        }
    }

    /// `.attribute(…)`: advice about managed memory.
    fn attribute(&mut self) -> Result<(), ParseError> {
        if self.cursor.eat(".attribute") { self.cursor.skip_past(")") } else { Ok(()) }
    }

    /// References to textures, samplers and surfaces are types of their own.
    pub(super) fn refuse_textures(&self) -> Result<(), ParseError> {
        match self.cursor.peek(0).text {
            text @ (".texref" | ".samplerref" | ".surfref") => {
                let what = format!(
                    "`{text}`: textures and surfaces are not supported; pass a buffer and load from it,"
                );
                self.cursor.error_here(ParseErrorKind::Unsupported(what))
            }
            _ => Ok(()),
        }
    }

    fn length(&mut self) -> Result<Length, ParseError> {
        let mut len = Length::Scalar;
        while self.cursor.eat("[") {
            if self.cursor.eat("]") {
                return Ok(Length::Unsized);
            }
            let extent = u64::from(self.cursor.number()?);
            let so_far = if let Length::Array(n) = len { n } else { 1 };
            len = Length::Array(so_far.saturating_mul(extent));
            self.cursor.expect("]")?;
        }
        Ok(len)
    }

    fn initial_values(&mut self) -> Result<Vec<Initial>, ParseError> {
        if !self.cursor.eat("=") {
            return Ok(Vec::new());
        }
        let mut values = Vec::new();
        if !self.cursor.eat("{") {
            values.push(self.initial_value()?);
            return Ok(values);
        }
        let mut depth = 1;
        while depth > 0 {
            // Rows of an array of several dimensions stand in braces of their own.
            match self.cursor.peek(0).text {
                "{" => depth += 1,
                "}" => depth -= 1,
                "," => {}
                _ => {
                    values.push(self.initial_value()?);
                    continue;
                }
            }
            self.cursor.bump();
        }
        Ok(values)
    }

    /// A number, or `name`, `name+offset`, `generic(name)+offset`.
    fn initial_value(&mut self) -> Result<Initial, ParseError> {
        if self.cursor.peek(0).kind != TokenKind::Word {
            return operand::literal(&mut self.cursor, true).map(Initial::Value);
        }
        let generic = self.cursor.is("generic") && self.cursor.peek(1).text == "(";
        if generic {
            self.cursor.bump();
            self.cursor.bump();
        }
        let name = self.name()?;
        if generic {
            self.cursor.expect(")")?;
        }
        let offset = operand::offset(&mut self.cursor)?;
        Ok(Initial::Address { name, offset, generic })
    }

    fn kernel(&mut self, module: &Module) -> Result<Kernel, ParseError> {
        self.cursor.bump();
        let mut kernel = Kernel::empty(self.name()?);
        kernel.params = self.params()?;
        kernel.directives = self.directives()?;
        let mut names = Names::of(module, &kernel);
        body::kernel_body(self, &mut kernel, &mut names, Unit::Kernel(module.kernels.len()))?;
        Ok(kernel)
    }

    /// `.func (returns) name (params) attributes`, then a body or `;`.
    fn function(&mut self, module: &mut Module, linkage: Linkage) -> Result<(), ParseError> {
        self.cursor.bump();
        self.attribute()?;
        let returns = self.params()?;
        let mut code = Kernel::empty(self.name()?);
        code.returns = returns;
        code.params = self.params()?;
        let noreturn = self.function_attributes()?;
        let defined = !self.cursor.eat(";");
        if defined {
            let mut names = Names::of(module, &code);
            body::kernel_body(self, &mut code, &mut names, Unit::Function(module.functions.len()))?;
        }
        module.functions.push(Function { linkage, noreturn, defined, code });
        Ok(())
    }

    /// What stands between a function's parameters and its body; whether it is `.noreturn`.
    pub(super) fn function_attributes(&mut self) -> Result<bool, ParseError> {
        let mut noreturn = false;
        loop {
            match self.cursor.peek(0).text {
                ".noreturn" => {
                    noreturn = true;
                    self.cursor.bump();
                }
                // What it promises about registers is for the assembler alone.
                ".abi_preserve" | ".abi_preserve_control" => {
                    self.cursor.bump();
                    self.cursor.number()?;
                }
                ".pragma" => self.cursor.skip_past(";")?,
                _ => return Ok(noreturn),
            }
        }
    }

    pub(super) fn params(&mut self) -> Result<Vec<KernelParam>, ParseError> {
        let mut params = Vec::new();
        if !self.cursor.eat("(") || self.cursor.eat(")") {
            return Ok(params);
        }
        loop {
            params.push(self.param()?);
            if !self.cursor.eat(",") {
                self.cursor.expect(")")?;
                return Ok(params);
            }
        }
    }

    fn param(&mut self) -> Result<KernelParam, ParseError> {
        if self.cursor.is(".reg") {
            let what =
                "a parameter in a register: `.param` is how functions are called since PTX 2.0, and `.reg`";
            return self.cursor.error_here(ParseErrorKind::Unsupported(what.into()));
        }
        self.cursor.expect(".param")?;
        let align = self.align()?;
        self.refuse_textures()?;
        let ty = self.scalar_type()?;
        if self.cursor.eat(".ptr") {
            // What a pointer points to is advice to the compiler; the parameter itself stays as it is.
            if space(self.cursor.peek(0).text).is_some() {
                self.cursor.bump();
            }
            self.align()?;
        }
        let name = self.param_name()?;
        let len = match self.length()? {
            Length::Scalar => None,
            Length::Array(n) if n <= 1 << 16 => Some(n as u32),
            _ => return self.cursor.expected("a parameter of at most 65536 elements"),
        };
        Ok(KernelParam { name, ty, align, len })
    }

    /// The name of a parameter; in a prototype it is `_`.
    fn param_name(&mut self) -> Result<Name, ParseError> {
        if self.cursor.is("_") {
            self.cursor.bump();
            return Ok(Name::unnamed());
        }
        self.name()
    }

    fn directives(&mut self) -> Result<Directives, ParseError> {
        let mut directives = Directives::default();
        loop {
            let token = self.cursor.peek(0);
            if token.text == "{" {
                return Ok(directives);
            }
            self.cursor.bump();
            match token.text {
                ".maxntid" => directives.max_threads = Some(self.triple()?),
                ".reqntid" => directives.required_threads = Some(self.triple()?),
                ".reqnctapercluster" => directives.required_cluster = Some(self.triple()?),
                ".minnctapersm" => directives.min_ctas_per_sm = Some(self.cursor.number()?),
                ".maxnreg" => directives.max_registers = Some(self.cursor.number()?),
                ".maxclusterrank" => directives.max_cluster_rank = Some(self.cursor.number()?),
                ".explicitcluster" => directives.explicit_cluster = true,
                ".pragma" => self.cursor.skip_past(";")?,
                _ => {
                    let expected = "a directive such as `.maxntid`, or `{`".into();
                    return error_at(token, ParseErrorKind::Expected { expected, found: shown(token) });
                }
            }
        }
    }

    fn triple(&mut self) -> Result<[u32; 3], ParseError> {
        let mut values = [self.cursor.number()?, 1, 1];
        for value in &mut values[1..] {
            if !self.cursor.eat(",") {
                break;
            }
            *value = self.cursor.number()?;
        }
        Ok(values)
    }
}

/// The state space of a directive.
pub(super) fn space(text: &str) -> Option<Space> {
    match text {
        ".global" => Some(Space::Global),
        ".shared" => Some(Space::Shared),
        ".const" => Some(Space::Const),
        ".local" => Some(Space::Local),
        ".param" => Some(Space::Param),
        _ => None,
    }
}
