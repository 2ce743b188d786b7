{{/* The name of the chart in labels. */}}
{{- define "holdfast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of the names of all objects: the release, and the chart unless they are alike. */}}
{{- define "holdfast.fullname" -}}
{{- $name := include "holdfast.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Names of the components. */}}
{{- define "holdfast.operator" -}}{{ include "holdfast.fullname" . }}-operator{{- end -}}
{{- define "holdfast.daemon" -}}{{ include "holdfast.fullname" . }}-daemon{{- end -}}
{{- define "holdfast.control" -}}{{ include "holdfast.fullname" . }}-control{{- end -}}
{{- define "holdfast.nodeRecord" -}}{{ include "holdfast.fullname" . }}-node-record{{- end -}}
{{- define "holdfast.redis" -}}{{ include "holdfast.fullname" . }}-redis{{- end -}}
{{- define "holdfast.test" -}}{{ include "holdfast.fullname" . }}-test{{- end -}}

{{/* Labels of every object. Arguments: root, component. */}}
{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/part-of: holdfast
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that never change, for selectors of pods. Arguments: root, component. */}}
{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ include "holdfast.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a pod: selector, those that the operator looks for, and the user's own.
     Arguments: root, component, more. */}}
{{- define "holdfast.podLabels" -}}
{{- $ours := include "holdfast.labels" . | fromYaml -}}
{{- toYaml (merge $ours (.more | default dict)) -}}
{{- end -}}

{{/* Reference of one of Holdfast's images. Arguments: root, name, given. */}}
{{- define "holdfast.image" -}}
{{- $image := .root.Values.image -}}
{{- .given | default (printf "%s/%s:%s" $image.registry .name ($image.tag | default .root.Chart.AppVersion)) -}}
{{- end -}}

{{- define "holdfast.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Bytes of a quantity such as 1.5Gi, rounded down. Exact below 8 PiB. */}}
{{- define "holdfast.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := . | toString -}}
{{- if not (kindIs "string" .) -}}{{- $text = . | int64 | toString -}}{{- end -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- if not (and (hasKey $units $unit) (regexMatch "^[0-9]+(\\.[0-9]+)?[A-Za-z]*$" $text)) -}}
{{- fail (printf "%q is no amount of memory: give a number of bytes, or one with Ki, Mi, Gi, Ti, k, M, G or T" $text) -}}
{{- end -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit | float64) | floor | int64 -}}
{{- end -}}

{{/* Bytes of the daemon's limit, and of its tmpfs: budget and overhead. */}}
{{- define "holdfast.daemonBytes" -}}
{{- $budget := include "holdfast.bytes" .Values.daemon.memory.budget | int64 -}}
{{- $overhead := include "holdfast.bytes" .Values.daemon.memory.overhead | int64 -}}
{{- add $budget $overhead -}}
{{- end -}}

{{/* The service account of a component. Arguments: root, component. */}}
{{- define "holdfast.account" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if not (or $account.create $account.name) -}}
{{- fail (printf "%s.serviceAccount.name names no account, and %s.serviceAccount.create is false: give the name of one that exists" .component .component) -}}
{{- end -}}
{{- $account.name | default (include (printf "holdfast.%s" .component) .root) -}}
{{- end -}}

{{/* A pod's own name and node, as environment. */}}
{{- define "holdfast.podEnvironment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* The DNS name in the certificate of a role. Arguments: root, role. */}}
{{- define "holdfast.tlsName" -}}
{{ .role }}.{{ .root.Release.Namespace }}.holdfast
{{- end -}}

{{/* The secret with the certificate of a role. Arguments: root, role. */}}
{{- define "holdfast.tlsSecret" -}}
{{- $certificates := .root.Values.security.certificates -}}
{{- if eq $certificates.source "existing" -}}
{{- $value := printf "%sSecret" .role -}}
{{- required (printf "security.certificates.%s names no secret, and the source is existing" $value) (get $certificates $value) -}}
{{- else -}}
{{ include "holdfast.fullname" .root }}-{{ .role }}-tls
{{- end -}}
{{- end -}}

{{/* Arguments of a daemon or an operator for its identity, and the mount of its secret. Arguments:
     root, role. */}}
{{- define "holdfast.tlsArguments" -}}
{{- if .root.Values.security.insecure -}}
- --insecure
{{- else -}}
- --tls=/etc/holdfast/tls
- --tls-domain={{ .root.Release.Namespace }}
{{- end -}}
{{- end -}}

{{- define "holdfast.tlsMount" -}}
{{- if not .root.Values.security.insecure -}}
- {name: tls, mountPath: /etc/holdfast/tls, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "holdfast.tlsVolume" -}}
{{- if not .root.Values.security.insecure -}}
- name: tls
  secret: {secretName: {{ include "holdfast.tlsSecret" . }}}
{{- end -}}
{{- end -}}

{{/* Locations where jobs may persist, as arguments. Arguments: root, credentials (whether to name
     them). */}}
{{- define "holdfast.locations" -}}
{{- range .root.Values.persistence.locations }}
{{- $location := omit . "secretName" }}
{{- $parts := splitList "/" .prefix }}
{{- if or (has "." $parts) (has ".." $parts) (contains "::" .prefix) }}
{{- fail (printf "persistence.locations: %s can be read in more than one way: write it without '.', '..' and '::'" .prefix) }}
{{- end }}
{{- if and .secretName (not (hasPrefix "s3://" .prefix)) }}
{{- fail (printf "persistence.locations: %s has a secretName, and only s3 locations can have their own credentials: remove it, and use daemon.storage" .prefix) }}
{{- end }}
{{- if and .secretName $.credentials }}
{{- $location = set $location "credentials" (printf "/etc/holdfast/storage/%s" .secretName) }}
{{- end }}
- {{ printf "--storage-location=%s" (toJson $location) | quote }}
{{- end }}
{{- end -}}

{{/* Rules of a role. Arguments: root, rules (from files/rbac.yaml). */}}
{{- define "holdfast.rules" -}}
{{- range .rules }}
# {{ .name }}: {{ .why }}
- apiGroups: {{ toJson .apiGroups }}
  resources: {{ toJson .resources }}
  {{- with .resourceNames }}
  resourceNames: {{ toJson . }}
  {{- end }}
  verbs: {{ toJson .verbs }}
{{- end }}
{{- end -}}

{{/* The secret with the URL of Redis; empty without Redis. */}}
{{- define "holdfast.redisSecret" -}}
{{- $redis := .Values.redis -}}
{{- if $redis.external.existingSecret -}}{{ $redis.external.existingSecret }}
{{- else if $redis.external.url -}}{{ include "holdfast.redis" . }}
{{- else if $redis.enabled -}}{{ $redis.existingSecret | default (include "holdfast.redis" .) }}
{{- end -}}
{{- end -}}

{{/* Whether the operator closes suspect nodes: "true" or empty. */}}
{{- define "holdfast.closesNodes" -}}
{{- $operator := .Values.operator -}}
{{- if has $operator.suspectNodes (list "Taint" "Cordon") -}}
{{- if not $operator.nodeRecord.enabled -}}
{{- fail "operator.suspectNodes needs the record of nodes: set operator.nodeRecord.enabled, or None" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* Whether the chart's own Redis runs: "true" or empty. */}}
{{- define "holdfast.ownRedis" -}}
{{- $external := .Values.redis.external -}}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret) -}}
{{- fail "redis.enabled and redis.external exclude each other: choose one" -}}
{{- end -}}
{{- if .Values.redis.enabled }}true{{ end -}}
{{- end -}}
