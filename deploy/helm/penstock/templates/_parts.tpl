{{/* Labels of an object: give the root and the part, such as gateway. */}}
{{- define "penstock.labels" -}}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "penstock.selector" . }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* Settings as environment variables, and those that come from secrets. */}}
{{- define "penstock.environment" -}}
{{- $settings := deepCopy .root.Values.settings }}
{{- if eq .part "gateway" }}
{{- $settings = merge $settings (dict "server" (dict "workers" .root.Values.gateway.workers)) }}
{{- end }}
{{- range $section, $values := $settings }}
{{- range $key, $value := $values }}
- name: PENSTOCK_{{ upper $section }}__{{ upper $key }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end }}
{{- with .root.Values.secrets.database }}
{{- if .name }}
- name: DATABASE_URL
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- range .root.Values.secrets.environment }}
- name: {{ .variable }}
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}

{{/* The pod of a part, without the probes and lifecycle that only servers have. */}}
{{- define "penstock.pod" -}}
automountServiceAccountToken: false
# Kubernetes would set PENSTOCK_PORT and others, which the program takes for settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: { type: RuntimeDefault }
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: settings
    secret: { secretName: {{ .root.Values.secrets.settings }}, defaultMode: 0440 }
  - name: tmp
    emptyDir: { medium: Memory, sizeLimit: 128Mi }
{{- end }}

{{- define "penstock.container" -}}
name: {{ .part }}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
env: {{- include "penstock.environment" . | nindent 2 }}
volumeMounts:
  - { name: settings, mountPath: /etc/penstock, readOnly: true }
  - { name: tmp, mountPath: /tmp }
resources: {{- toYaml (index .root.Values .part).resources | nindent 2 }}
{{- end }}

{{/* A Deployment of a role of the service. `probes` are those of its container. */}}
{{- define "penstock.deployment" -}}
{{- $values := index .root.Values .part }}
{{- $drain := int .root.Values.settings.server.drain_s }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .root.Release.Name }}-{{ .part }}
  labels: {{- include "penstock.labels" . | nindent 4 }}
spec:
  {{- if not (dig "autoscaling" "enabled" false $values) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy:
    rollingUpdate: { maxSurge: 1, maxUnavailable: 0 }
  selector:
    matchLabels: {{- include "penstock.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "penstock.labels" . | nindent 8 }}
    spec:
      {{- include "penstock.pod" . | nindent 6 }}
      terminationGracePeriodSeconds: {{ add .root.Values.unlistedSeconds $drain .root.Values.stopSeconds }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "penstock.selector" . | nindent 14 }}
      containers:
        - {{- include "penstock.container" . | nindent 10 }}
          args: [serve, --config, /etc/penstock/penstock.toml, --role, {{ .part }}]
          {{- .probes | nindent 10 }}
{{- end }}

{{/* No new settings reach a running pod, so the number of pods that may be away at a time is limited. */}}
{{- define "penstock.disruptions" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .root.Release.Name }}-{{ .part }}
  labels: {{- include "penstock.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ (index .root.Values .part).disruptions.maxUnavailable }}
  selector:
    matchLabels: {{- include "penstock.selector" . | nindent 6 }}
{{- end }}

{{- define "penstock.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .root.Release.Name }}-{{ .part }}
  labels: {{- include "penstock.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "penstock.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    {{- if eq .part "gateway" }}
    - from: {{- toYaml .root.Values.networkPolicy.clients | nindent 8 }}
      ports: [{ port: http, protocol: TCP }]
    {{- end }}
    - from: {{- toYaml .root.Values.networkPolicy.prometheus | nindent 8 }}
      ports: [{ port: metrics, protocol: TCP }]
  egress: {{- toYaml .root.Values.networkPolicy.egress | nindent 4 }}
{{- end }}
