"""How secrets look in text: tokens by their published form, and values whose names say that they are secret.

Forms and names follow two public lists: gitleaks (config/gitleaks.toml, its rule ids are in the comments) and
detect-secrets (plugins/keyword.py). Neither tool is used itself: they search files for a person to judge, and
take every number named `tokens...` for a secret. A JSON document stays one. Imports nothing of the harness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REDACTED = "***"


@dataclass(frozen=True)
class SecretPattern:
    """One form of a secret."""

    needles: tuple[str, ...]
    """Lower case; text without any of them holds no such secret. Looking for them first is much faster."""
    pattern: re.Pattern[str]
    """Its first group, where it has one, stays."""

    def replaced(self, text: str, lower: str) -> str:
        """lower: the text in lower case."""
        if not any(needle in lower for needle in self.needles):
            return text
        return self.pattern.sub(rf"\g<1>{REDACTED}" if self.pattern.groups else REDACTED, text)


# By needles. Lengths are shorter than the full form: logs are cut.
_TOKENS: dict[str, str] = {
    "hf_": r"hf_[A-Za-z0-9]{16,}",  # huggingface-access-token
    "api_org_": r"api_org_\w{16,}",  # huggingface-organization-api-token
    "ghp_": r"ghp_\w{20,}", "gho_": r"gho_\w{20,}", "ghu_": r"ghu_\w{20,}",  # github-pat, -oauth, -app-token
    "ghs_": r"ghs_\w{20,}", "ghr_": r"ghr_\w{20,}",  # github-app-token, github-refresh-token
    "github_pat_": r"github_pat_\w{20,}",  # github-fine-grained-pat
    "glpat- glcbt- gldt- glffct- glft- glimt-": r"\bgl(?:pat|cbt|dt|ffct|ft|imt)-[\w.-]{16,}",  # gitlab-*
    "glagent- gloas- glptt- glrt- glsoat-": r"\bgl(?:agent|oas|ptt|rt|soat)-[\w.-]{16,}",  # gitlab-*
    "sk-": r"\bsk-[\w-]{20,}",  # openai-api-key, anthropic-api-key
    "xox": r"\bxox[a-z](?:\.xox[a-z])?-[\w-]{10,}",  # slack-*-token
    "xapp-": r"\bxapp-[\w-]{10,}",  # slack-app-token
    "hooks.slack.com": r"(hooks\.slack\.com/)[\w/+]{16,}",  # slack-webhook-url
    "webhook.office.com": r"(webhook\.office\.com/)[\w/@-]{16,}",  # microsoft-teams-webhook
    "a3t": r"\bA3T[A-Z0-9]{17}\b", "akia": r"\bAKIA[A-Z0-9]{16}[\w-]*", "asia": r"\bASIA[A-Z0-9]{16}\b",
    "abia": r"\bABIA[A-Z0-9]{16}\b", "acca": r"\bACCA[A-Z0-9]{16}\b",  # aws-access-token
    "absk": r"\bABSK[A-Za-z0-9+/]{40,}={0,2}",  # aws-amazon-bedrock-api-key-long-lived
    "aiza": r"\bAIza[\w-]{16,}",  # gcp-api-key
    "ya29.": r"\bya29\.[\w-]{16,}", "gocspx-": r"\bGOCSPX-[\w-]{16,}",  # Google OAuth token, client secret
    "q~": r"\b[\w~.]{3}\dQ~[\w~.-]{20,}",  # azure-ad-client-secret
    "ltai": r"\bLTAI[A-Za-z0-9]{16,}",  # alibaba-access-key-id
    "doo_v1_ dop_v1_ dor_v1_": r"\bdo[opr]_v1_[a-f0-9]{20,}",  # digitalocean-*
    "dapi": r"\bdapi[a-f0-9]{32}(?:-\d)?",  # databricks-api-token
    "dckr_pat_": r"dckr_pat_[\w-]{16,}",  # Docker Hub's, in neither list
    "nvapi-": r"\bnvapi-[\w-]{16,}",  # NVIDIA NGC's, in neither list
    "npm_": r"\bnpm_[A-Za-z0-9]{20,}", "pypi-ag": r"\bpypi-Ag[\w-]{30,}",  # npm-, pypi-*-token
    "sk_live_ rk_live_ sk_test_ rk_test_": r"\b[rs]k_(?:live|test)_\w{10,}",  # stripe-access-token
    "sg.": r"\bSG\.[\w-]{16,}\.[\w-]{16,}",  # sendgrid-api-token
    "hvs. hvb.": r"\bhv[bs]\.[\w-]{24,}",  # vault-service-token, vault-batch-token
    "glsa_": r"\bglsa_\w{20,}", "glc_": r"\bglc_[A-Za-z0-9+/]{32,}={0,3}",  # grafana-*
    "pplx-": r"\bpplx-\w{20,}", "gsk_": r"\bgsk_\w{20,}", "r8_": r"\br8_\w{20,}",  # of inference services
    "lin_api_": r"lin_api_\w{20,}", "ntn_": r"\bntn_\w{20,}",  # linear-api-key, notion-api-token
    "age-secret-key-1": r"AGE-SECRET-KEY-1[A-Z0-9]{20,}",  # age-secret-key
    "eyj": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",  # jwt: two JSON objects in base64
}  # fmt: skip

_OPTION = (
    r"--(?:[\w-]*[-_])?(?:pass(?:w(?:or)?d|phrase)?|token|secret|credentials?|creds"
    r"|(?:api|access|auth|secret|private)[-_]?key)"
)
# A value is what stands between quotes, escaped characters in pairs, or one word. Its opening quote stays.
# Quotes have backslashes before them where text of JSON is a value of JSON.
OPEN = r"""(?:\\*["'](?!\*\*\*))?"""
VALUE = (
    r"""(?:(?<=\\["'])[^"'\\\n]+|(?<=[^\\]")(?:\\.|[^"\\\n])+|(?<=[^\\]')(?:\\.|[^'"\\\n])+"""
    r"""|(?<!["'])(?!(?:null|None|true|false|True|False)\b|\*\*\*)[^\s"'\\,;&{}\[\]]+)"""
)
SECRET_PATTERNS: tuple[SecretPattern, ...] = (
    SecretPattern(("://",), re.compile(r"""(://)[^/\s@"'<>]+(?=@)""")),
    *(SecretPattern(tuple(needles.split()), re.compile(form)) for needles, form in _TOKENS.items()),
    SecretPattern(("bearer",), re.compile(r"((?i:\bbearer)\s+)[\w.~+/=-]{8,}")),
    SecretPattern(
        ("authorization",),
        re.compile(
            r"""((?i:authorization)\\?["']?\s*[:=]\s*\\?["']?(?i:basic|token|apikey)\s+)[\w.~+/=-]+"""
        ),
    ),
    SecretPattern(
        ("cookie",), re.compile(r"""((?i:\b(?:set-)?cookie)\\?["']?:\s*\\?["']?)[^\s"'\\][^"'\\\n]*""")
    ),
    SecretPattern(
        ("-----begin",),
        re.compile(
            r"""(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)(?:(?!-----END)(?:\\+[A-Za-z]|[^"'\\]))+"""
        ),
    ),
    # Addresses that S3, Google, CloudFront (which serves Hugging Face's files) and Azure sign.
    SecretPattern(
        ("signature=", "sig=", "credential=", "security-token=", "accesskeyid=", "accessid=", "key="),
        re.compile(
            r"""((?:[?&]|\\u0026|&amp;)(?i:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig"""
            r"""|awsaccesskeyid|googleaccessid|key)=)[^&\s"'<>\\;]+"""
        ),
    ),
    SecretPattern(("signature=", "sig="), re.compile(r"((?<![A-Za-z])(?i:sig(?:nature)?)=)[\w%+/=-]{20,}")),
    # Options of commands.
    SecretPattern(
        ("--",),
        re.compile(
            "(" + _OPTION + r"""(?:=|["',\\]*(?:\s|\\+n)+|\\*["'],)(?!\\*["']?-)""" + OPEN + ")" + VALUE
        ),
    ),
    # curl-auth-user; user and group of a container are numbers.
    SecretPattern(
        ("curl", "wget"),
        re.compile(
            r"""(\b(?:curl|wget)\b[^\n]{0,200}?[\s"'](?:-u|--user)[\s"',=\\]*[^\s:"'\\]+:)[^\s"'\\,]+"""
        ),
    ),
    SecretPattern(
        ("sshpass", "login", "mysql", "mariadb"),
        re.compile(
            r"""(\b(?:sshpass|(?:docker|podman|helm|oc|skopeo|apptainer|singularity)\b[^\n]{0,80}?\blogin"""
            r"""|mysql\w*|mariadb\w*)\b[^\n]{0,160}?[\s"']-p[\s"',\\]*)[^\s"'\\,-][^\s"'\\,]*"""
        ),
    ),
    SecretPattern(("wandb",), re.compile(r"""(\bwandb["',\s]+login\b[^\n]{0,80}?[\s"'])[0-9a-f]{40}\b""")),
    # .netrc
    SecretPattern(("machine",), re.compile(r"""(\bmachine\s+\S+\s+login\s+\S+\s+password\s+)[^\s"'\\]+""")),
    # -p of other commands may be a port, a partition or a folder: none mixes digits and both cases.
    SecretPattern(
        ("-p",),
        re.compile(
            r"""(-p(?<=[\s"']-p)(?:["',\\]*\s+|\\*["'],)\\*["']?)(?=[^\s"']*[a-z])(?=[^\s"']*[A-Z])(?=[^\s"']*\d)"""
            r"""[^\s"'\\,/:=]{8,}(?=[\s"'\\,]|$)"""
        ),
    ),
)
